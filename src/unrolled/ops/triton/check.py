"""Whether compiled Triton kernels are correct: known compiler bugs, and a check at first use.

A correct kernel may be miscompiled for one GPU by one version of Triton. So each is compared with the plain
form on a few tokens, once per GPU, at its first use. If the results differ, the plain form replaces it,
with a warning. Bugs that a small input may not trigger, or that end the process, are listed by version
instead.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.contract import UnsupportedError
from unrolled.ops.triton import Version, version
from unrolled.ops.triton.launch import recording

TOKENS = 130  # three chunks, the last of them cut off
LARGEST_ERROR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""Relative to the largest value: about 10 roundings of 16 bits; wrong code is off by 0.1 and more."""

SMALLEST = 1e-2
"""Smaller results count as 0: inputs are about 1, and exact zeros are rounding errors in fp64."""


class Call(NamedTuple):
    """What a kernel is compiled for, except strides and packing."""

    operation: str  # as the warning names it
    kind: str  # "forward", "backward" or "step"
    device: torch.device
    dtype: torch.dtype
    widths: tuple[int, ...]  # of the heads; none where nothing is multiplied by tensor cores
    gated: bool
    others: tuple[int, ...]  # the query heads per key head, or the number of taps, and flags


class Example(NamedTuple):
    """The arguments of a small call, and its results in fp64 by name."""

    arguments: tuple[object, ...]
    expected: dict[str, Tensor]


class Fault(NamedTuple):
    """A known bug of Triton's compilers, from version `first` up to but not including version `fixed`."""

    what: str  # what Triton does
    capability: tuple[int, int]
    first: Version
    fixed: Version
    narrowest: int = 1  # calls are affected if one of their widths is at least this
    gated_backward: bool = False  # whether only gradients of gates are affected


FAULTS = (
    # flash-linear-attention rejects these, see its issue 640.
    Fault("makes mistakes in gradients of gates on Hopper", (9, 0), (3, 4), (3, 7, 1), gated_backward=True),
    # triton#11366, found in 3.7.1 and not in 3.5.1. Versions between are rejected too, since it ends the
    # process: with 3.6.0, kernels for heads 128 wide read at illegal addresses on an H200.
    Fault("may read beyond shared memory on Hopper", (9, 0), (3, 6), (3, 8), narrowest=17),
    # triton#10821, found in 3.6.0, 3.7.1 and 3.8.0: two products that are added up in one place.
    Fault("makes mistakes in sums of products on B300", (10, 3), (3, 6), (3, 9)),
)

_faults: dict[Call, str | None] = {}  # of the calls that were checked
_warned: set[tuple[torch.device, str]] = set()
_required = False


@contextmanager
def required() -> Iterator[None]:
    """Raise UnsupportedError where the plain form would replace kernels; for tests and benchmarks."""
    global _required
    before, _required = _required, True
    try:
        yield
    finally:
        _required = before


def trusted(
    call: Call, kernels: Callable[..., tuple[Tensor, ...]], example: Callable[[Call], Example]
) -> bool:
    """Whether the kernels of this call are correct here, as far as is known; checks them the first time."""
    fault = _faults.get(call, "")
    if fault == "":  # it has not been checked
        machine = compiled_for(call.device)
        if machine is None:
            return True
        found = known_fault(call, *machine)
        if found is None and recording(call.device):
            return True  # it is checked at the next use
        found = found or mistake(call, kernels, example)
        triton = ".".join(map(str, machine[1]))
        fault = _faults[call] = None if found is None else f"Triton {triton} {found}"
    if fault is not None and (_required or (call.device, fault) not in _warned):
        _report(call, fault)
    return fault is None


def _report(call: Call, fault: str) -> None:
    heads = f", heads {' and '.join(map(str, call.widths))} wide" if call.widths else ""
    reason = f"on {call.device}, as {fault} ({call.kind}, {call.dtype}{heads})"
    if _required:
        raise UnsupportedError(f"the kernels of {call.operation} cannot be used {reason}")
    _warned.add((call.device, fault))
    warnings.warn(f"{call.operation} runs in plain PyTorch {reason}", stacklevel=3)


def compiled_for(device: torch.device) -> tuple[tuple[int, int], Version] | None:
    """Return a GPU's capability and Triton's version, or None where kernels are interpreted."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device), version()


def known_fault(call: Call, capability: tuple[int, int], triton: Version) -> str | None:
    """Return the known bug that affects this call, or None. Steps have none: they multiply in another way."""
    for fault in FAULTS:
        affected = not fault.gated_backward or (call.gated and call.kind == "backward")
        affected = affected and call.kind != "step" and max(call.widths, default=0) >= fault.narrowest
        if affected and capability == fault.capability and fault.first <= triton < fault.fixed:
            return fault.what
    return None


@torch.no_grad()
def mistake(
    call: Call, kernels: Callable[..., tuple[Tensor, ...]], example: Callable[[Call], Example]
) -> str | None:
    """Run a few tokens and compare with the plain form in fp64; return the difference in words, or None."""
    arguments, expected = example(call)
    try:
        found = kernels(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any type, from the compiler or the launch; the plain form uses neither
        return f"fails with {type(error).__name__}: {error}"
    for (name, exact), x in zip(expected.items(), found, strict=True):
        if not exact.numel():
            continue
        largest = exact.abs().max().clamp(min=SMALLEST)
        share = float((x.double() - exact).abs().max() / largest)
        if not share <= LARGEST_ERROR[call.dtype]:  # also true for NaN
            return f"makes a mistake in {name}, off by {share:.2g} of its largest value"
    return None


def random_tensors(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that draws normal numbers on a device: `draw(*shape, dtype=torch.float32)`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return draw
