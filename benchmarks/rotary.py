"""Measure rotary positions and their gradient, in the kernel and in plain PyTorch, in turn on one thread.

python benchmarks/rotary.py
"""

from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from unrolled.ops.dispatch import prefer
from unrolled.ops.positions import rotary

SIZES = [(8, 256, 4, 32), (1, 4096, 8, 64)]  # batch, tokens, heads, width
ROUNDS = 60


def seconds(backend: str, x: Tensor, grad: Tensor) -> float:
    """Return the seconds to rotate queries, a slice of a larger projection, and to compute the gradient."""
    positions = torch.arange(x.shape[1]).expand(x.shape[:2])
    start = perf_counter()
    with prefer(backend):
        torch.autograd.grad(rotary(x, positions), x, grad)
    return perf_counter() - start


def main() -> None:
    """Print a line for each type and size."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for B, T, H, D in SIZES:
            projected = torch.randn(B, T, 3 * H * D).to(dtype)
            x = projected[..., : H * D].unflatten(-1, (H, D)).requires_grad_()
            grad = torch.randn(B, T, H, D).to(dtype)
            rounds = [[seconds(name, x, grad) for name in ("plain", "native")] for _ in range(ROUNDS)]
            plain, native = (1e3 * median(times) for times in zip(*rounds, strict=True))
            print(f"{dtype}, {[B, T, H, D]}: {plain:.2f} ms, kernel {native:.2f} ms, {plain / native:.1f}x")


if __name__ == "__main__":
    main()
