"""A small model and a synthetic data set that keep the interface of the real ones."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unrolled.contract import Batch
from unrolled.training import TrainConfig, TrainResult, read_log, train

VOCAB = 7
TO_TRAIN = ("resume", "tensorboard", "metadata", "on_start", "outdated", "on_line")


@dataclass
class StandInConfig:
    width: int = 16
    dropout: float = 0.2


class StandIn(nn.Module):
    """A window of two tokens -> hidden layer with dropout -> tied output; a buffer that forward changes."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self.config = StandInConfig(**options)
        width = self.config.width
        self.gradient_checkpointing = False
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCAB, width)
            self.blocks = nn.Linear(2 * width, width)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCAB)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def _body(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(
            self.norm(torch.tanh(self.blocks(x))), self.config.dropout, self.training
        )

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += self.training
        x = self.embedding(inputs)
        x = torch.cat([x, x.roll(1, dims=1)], dim=-1)
        remember_less = self.gradient_checkpointing and self.training
        x = checkpoint(self._body, x, use_reentrant=False) if remember_less else self._body(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(asdict(self.config)))
        save_file({n: x.detach() for n, x in self.named_parameters()}, path / "model.safetensors")


@dataclass
class Cycles:
    """Noisy cycles through the vocabulary; each example hides another number of its targets."""

    length: int = 12
    noise: float = 0.1
    val_sizes: tuple[int, ...] = (5, 5, 2)

    def _draw(self, key: int, batch_size: int) -> Batch:
        g = torch.Generator().manual_seed(key)
        start = torch.randint(VOCAB, (batch_size, 1), generator=g)
        tokens = (start + torch.arange(self.length + 1)) % VOCAB
        noisy = torch.rand(tokens.shape, generator=g) < self.noise
        tokens = torch.where(noisy, torch.randint(VOCAB, tokens.shape, generator=g), tokens)
        hidden = torch.arange(self.length) < torch.randint(self.length, (batch_size, 1), generator=g)
        return Batch(tokens[:, :-1], tokens[:, 1:].masked_fill(hidden, -100))

    def batch(self, split: str, *, step: int, batch_size: int, seed: int) -> Batch:
        return self._draw(seed * 1_000_003 + step, batch_size)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        for i, size in enumerate(self.val_sizes):
            yield self._draw(-1 - i, size)


class CallsAt(Cycles):
    """Calls a function when the batch of a step is requested."""

    def __init__(self, step: int, function: Callable[[], object]) -> None:
        super().__init__()
        self.step, self.function = step, function

    def batch(self, split: str, *, step: int, batch_size: int, seed: int) -> Batch:
        if step == self.step:
            self.function()
        return super().batch(split, step=step, batch_size=batch_size, seed=seed)


def config(**changes: Any) -> TrainConfig:
    small: dict[str, Any] = {"steps": 12, "batch_size": 4, "lr": 1e-2, "warmup_steps": 3, "threads": 1}
    small |= {"eval_every": 3, "checkpoint_every": 4, "log_every": 2}
    return TrainConfig(**small | changes)


def run(run_dir: Path, *, data: Any = None, model: Any = None, **options: Any) -> TrainResult:
    """Train the stand-in; keywords that `train` knows go there, all others into the config."""
    to_train = {k: options.pop(k) for k in TO_TRAIN if k in options}
    model = model or StandIn()
    return train(model, data or Cycles(), config(**options), run_dir, progress=False, **to_train)


def weights(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "last.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal bit for bit: weights, optimiser and random generators."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def losses(run_dir: Path) -> list[tuple[str, int, float]]:
    """The logged losses of training and evaluation."""
    lines = read_log(run_dir / "log.jsonl")
    return [(x["event"], x["step"], x["loss"]) for x in lines if x["event"] in ("train", "eval")]
