"""Whether compiled Triton kernels are correct: known compiler bugs, and a check at first use.

A correct kernel may be miscompiled for one GPU by one version of Triton. So each is compared with the plain
form on a few tokens, once per GPU, at its first use. If the results differ, the plain form replaces it,
with a warning. Bugs that a small input may not trigger, or that end the process, are listed by version
instead.
"""

import importlib
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.linear import chunked
from unrolled.ops.linear.chunked import Inputs, Options, OutputGradients, Token

Version = tuple[int, ...]
TOKENS = 130  # three chunks, the last of them cut off
LARGEST_ERROR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""Relative to the largest value: about 10 roundings of 16 bits; wrong code is off by 0.1 and more."""


class Call(NamedTuple):
    """What a kernel is compiled for, except strides and packing."""

    kind: str  # "forward", "backward" or "step"
    device: torch.device
    dtype: torch.dtype
    heads_per_group: int
    R: int
    M: int
    gated: bool
    causal: bool
    normalize: bool

    @classmethod
    def of(cls, kind: str, inputs: Inputs | Token, causal: bool, normalize: bool) -> "Call":
        """Describe a call by its inputs, whose heads and widths are the last two axes."""
        (H, R), (G, M), gated = inputs.q.shape[-2:], inputs.v.shape[-2:], inputs.log_decay is not None
        return cls(kind, inputs.q.device, inputs.q.dtype, H // max(G, 1), R, M, gated, causal, normalize)


class Fault(NamedTuple):
    """A known bug of Triton's compilers, from one version to before another."""

    what: str  # what Triton does
    capability: tuple[int, int]
    first: Version
    fixed: Version
    narrowest: int = 1  # the smallest max(R, M) that is affected
    gated_backward: bool = False  # whether only gradients of gates are affected


FAULTS = (
    # flash-linear-attention rejects these, see its issue 640.
    Fault("makes mistakes in gradients of gates on Hopper", (9, 0), (3, 4), (3, 7, 1), gated_backward=True),
    # triton#11366, found in 3.7.1 and not in 3.5.1. Versions between are rejected too: it ends the process.
    Fault("may read beyond shared memory on Hopper", (9, 0), (3, 6), (3, 8), narrowest=17),
    # triton#10821, found in 3.6.0, 3.7.1 and 3.8.0: two products that are added up in one place.
    Fault("makes mistakes in sums of products on B300", (10, 3), (3, 6), (3, 9)),
)

RESULTS = {
    "forward": ("the output", "S", "z", "the divisor"),
    "backward": tuple(f"the gradient of {name}" for name in ("q", "k", "v", "log_decay", "S", "z")),
    "step": ("the output", "S", "z"),
}
_verdicts: dict[Call, bool] = {}
_warned: set[tuple[torch.device, str]] = set()


def trusted(call: Call, kernels: Callable[..., tuple[Tensor, ...]]) -> bool:
    """Whether the kernels of this call are correct here, as far as is known; checks them the first time."""
    verdict = _verdicts.get(call)
    if verdict is not None:
        return verdict
    machine = compiled_for(call.device)
    if machine is None:
        return True
    fault = known_fault(call, *machine) or mistake(call, kernels)
    _verdicts[call] = fault is None
    if fault is not None and (call.device, fault) not in _warned:
        _warned.add((call.device, fault))
        version = ".".join(map(str, machine[1]))
        warnings.warn(
            f"linear attention runs in plain PyTorch on {call.device}, as Triton {version} {fault} "
            f"({call.kind}, {call.dtype}, heads {call.R} and {call.M} wide)",
            stacklevel=2,
        )
    return fault is None


def compiled_for(device: torch.device) -> tuple[tuple[int, int], Version] | None:
    """Return a GPU's capability and Triton's version; None when interpreted or recording a CUDA graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.get_device_capability(device), triton_version()


@cache
def triton_version() -> Version:
    """Return the version of Triton; raises ImportError if it is not installed."""
    return tuple(map(int, re.findall(r"\d+", importlib.import_module("triton").__version__)[:3]))


def known_fault(call: Call, capability: tuple[int, int], triton: Version) -> str | None:
    """Return the known bug that affects this call, or None. Steps multiply in another way: none does."""
    for fault in FAULTS:
        affected = not fault.gated_backward or (call.gated and call.kind == "backward")
        affected = affected and call.kind != "step" and max(call.R, call.M) >= fault.narrowest
        if affected and capability == fault.capability and fault.first <= triton < fault.fixed:
            return fault.what
    return None


@torch.no_grad()
def mistake(call: Call, kernels: Callable[..., tuple[Tensor, ...]]) -> str | None:
    """Run a few tokens and compare with the plain form in fp64; return the difference in words, or None."""
    arguments, expected = _example(call)
    try:
        found = kernels(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any type, from the compiler or the launch; the plain form uses neither
        return f"fails with {type(error).__name__}: {error}"
    for name, x, exact in zip(RESULTS[call.kind], found, expected, strict=True):
        share = float((x.double() - exact).abs().max() / exact.abs().max()) if exact.numel() else 0.0
        if not share <= LARGEST_ERROR[call.dtype]:  # nor NaN
            return f"makes a mistake in {name}, off by {share:.2g} of its largest value"
    return None


def _example(call: Call) -> tuple[tuple[object, ...], tuple[Tensor, ...]]:
    """Make the arguments of a small call, and its results in fp64."""
    generator = torch.Generator().manual_seed(0)
    P, R, M, T = call.heads_per_group, call.R, call.M, 1 if call.kind == "step" else TOKENS

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(call.device, dtype)

    q, k = (random(1, T, heads, R).abs().add(0.5).to(call.dtype) for heads in (P, 1))
    v = random(1, T, 1, M, dtype=call.dtype)
    # weak gates, so that the initial state reaches the final one
    gates = -random(1, T, 1).abs() / 20 if call.gated else None
    inputs = Inputs(q, k, v, gates, random(1, 1, R, M), random(1, 1, R).abs())
    flags = call.causal, call.normalize
    exact = Inputs(*(None if x is None else x.double() for x in inputs))  # type: ignore[arg-type]
    o, *state, den = chunked.forward(exact, *flags)
    if call.kind == "forward":
        return (inputs, Options(None, *flags)), (o, *state, den)
    if call.kind == "step":
        gate = None if gates is None else gates[:, 0]
        token = Token._make((q[:, 0], k[:, 0], v[:, 0], inputs.kv, inputs.k_sum, gate))
        return (token, call.normalize), (o[:, 0], *state)
    grads = OutputGradients(random(1, T, P, M, dtype=call.dtype), random(1, 1, R, M), random(1, 1, R))
    exact_grads = OutputGradients(*(x.double() for x in grads))
    expected = chunked.backward(exact_grads, exact, den, *flags)
    return (grads, inputs, den.float(), Options(None, *flags)), expected
