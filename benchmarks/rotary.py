"""Time of rotary positions: the C++ kernel against plain PyTorch, in turn, on one thread.

    python benchmarks/rotary.py

First the rotation of queries and its gradient, then a whole update of linear attention between windows, in
which every second layer has rotary positions.
"""

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch

from unrolled.cli.recipes import RECIPES
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops import rotation
from unrolled.ops.positions import rotary
from unrolled.training import TrainConfig
from unrolled.training.optim import build_optimizers

SIZES = [(8, 256, 4, 32), (1, 4096, 8, 64)]  # batch, tokens, heads, width
ROUNDS, WARM_UP = 60, 4


def compare(name: str, run: Callable[[], object]) -> None:
    """Print the median times of both forms."""
    plain = patch.object(rotation, "_supports", return_value=False)
    times: list[list[float]] = [[], []]
    for _ in range(WARM_UP + ROUNDS):
        for form, seconds in zip((plain, nullcontext()), times, strict=True):
            with form:
                start = perf_counter()
                run()
                seconds.append(perf_counter() - start)
    slow, fast = (1e3 * median(x[WARM_UP:]) for x in times)
    print(f"{name}: {slow:.2f} ms, kernel {fast:.2f} ms, {slow / fast:.2f}x")


def rotations() -> None:
    """Rotate queries that are a part of a wider projection, and compute the gradient."""
    for dtype in (torch.float32, torch.bfloat16):
        for B, T, H, D in SIZES:
            x = torch.randn(B, T, 3 * H * D).to(dtype)[..., : H * D].unflatten(-1, (H, D)).requires_grad_()
            grad, positions = torch.randn(B, T, H, D).to(dtype), torch.arange(T).expand(B, T)

            def run() -> object:
                return torch.autograd.grad(rotary(x, positions), x, grad)  # noqa: B023, run before the next

            compare(f"{dtype}, {[B, T, H, D]}", run)


def update() -> None:
    """Update the model on 8 windows of 256 characters, in bf16."""
    recipe = RECIPES["small-lm"]
    hybrid = {
        "attention": ["linear", "window"] * 2,
        "attention_options": {"linear": {"conv": 4, "rotary": False}, "window": {"window": 32}},
        "activation": "gelu",
    }
    settings = {**recipe["model"], **hybrid}
    model = Decoder(DecoderConfig(vocab_size=65, **settings)).train()
    tokens = torch.randint(65, (recipe["train"]["batch_size"], recipe["data"]["length"] + 1))
    optimizers = build_optimizers(model, TrainConfig(**recipe["train"]))

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    compare("an update", run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rotations()
    update()
