"""How the time of a layer grows with the length of the sequence."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from unrolled import attention
from unrolled.bench.fits import exponent
from unrolled.threads import cpu_threads

D_MODEL, N_HEADS, KERNEL = 64, 4, 3
WINDOW = 64  # tokens on each side
REPEATS = 3
OPTIONS: dict[str, dict[str, int]] = {
    **{name: {"window": WINDOW} for name in ("window", "longformer", "long_short")},
    # O(n sqrt(n)) only with strides of about sqrt(length) and one summary position per block.
    "sparse_transformer": {"summary": 1},
}
SETUP = f"forward, one sequence, d = {D_MODEL}, {N_HEADS} heads, CPU time on one thread, medians of {REPEATS}"


class Convolutions(nn.Module):
    """A stack of convolutions over the tokens of `[B,n,d]`."""

    def __init__(self, *layers: nn.Conv1d):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,n,d]` -> `[B,n,d]`."""
        y: Tensor = self.layers(x.mT)
        return y.mT


class LSTM(nn.LSTM):
    """An LSTM that returns no state, `[B,n,d]` -> `[B,n,d]`."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Run over the tokens."""
        y: Tensor = super().forward(x)[0]
        return y


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: LSTM(D_MODEL, D_MODEL, batch_first=True),
    "convolution": lambda: Convolutions(nn.Conv1d(D_MODEL, D_MODEL, KERNEL, padding=KERNEL // 2)),
    "separable": lambda: Convolutions(
        nn.Conv1d(D_MODEL, D_MODEL, KERNEL, padding=KERNEL // 2, groups=D_MODEL),
        nn.Conv1d(D_MODEL, D_MODEL, 1),
    ),
}


def growth(name: str, lengths: Sequence[int]) -> float:
    """Return p of time = c n^p, fitted to the median CPU times of a forward pass; see `fits.exponent`."""
    with cpu_threads(1), torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return exponent(lengths, [seconds(name, n) for n in lengths])


def seconds(name: str, length: int) -> float:
    """Return the median CPU time of a forward pass; unlike wall time, it excludes other processes."""
    module, x, taken = layer(name, length), torch.randn(1, length, D_MODEL), []
    module(x)  # warm-up
    for _ in range(REPEATS):
        began = time.process_time()
        module(x)
        taken.append(time.process_time() - began)
    return median(taken)


def layer(name: str, length: int) -> nn.Module:
    """Make a mechanism, causal if it supports that, or one of `OTHERS`, for sequences of this length."""
    if name in OTHERS:
        return OTHERS[name]().eval()
    mechanism: Any = attention.load(name)
    options = OPTIONS.get(name, {}) | ({"max_length": length} if mechanism.supports.max_length else {})
    if name == "sparse_transformer":
        options["stride"] = round(length**0.5)
    module: nn.Module = mechanism(D_MODEL, N_HEADS, causal=mechanism.supports.causal, **options)
    return module.eval()
