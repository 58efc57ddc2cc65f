"""The C++ library of CPU kernels: whether it is there, and which instruction set it runs.

The sources lie in `native/`, know nothing of PyTorch and are built when the package is installed with a
compiler at hand. They are compiled with OpenMP but linked to no OpenMP runtime: the
threads are those of torch.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

INT, FLAG, FLOAT, POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
_RESULTS = {"fma_peak": ctypes.c_double, "linear_saved_floats": ctypes.c_int64}

_in_use: str | None = None


class TensorView(ctypes.Structure):
    """A tensor `[batch, tokens, heads, width]` whose last axis is contiguous."""

    _fields_ = [("at", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


def available() -> bool:
    """Whether the kernels can be used."""
    return missing() is None


def missing() -> str | None:
    """Why the kernels cannot be used, in one sentence; None if they can."""
    found = _library()
    return found if isinstance(found, str) else None


@cache
def instruction_sets() -> tuple[str, ...]:
    """Instruction sets that both this machine and the library have, best first; empty without the library."""
    library = _library()
    return () if isinstance(library, str) else tuple(library.instruction_sets().decode().split())


def instruction_set() -> str:
    """Return the instruction set in use: "avx512", "avx2", "neon" or "baseline"."""
    return _in_use or instruction_sets()[0]


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run the kernels of another instruction set, in tests."""
    global _in_use
    if name not in instruction_sets():
        raise ValueError(f"instruction set is {name!r}, but must be one of {', '.join(instruction_sets())}")
    before, _in_use = _in_use, name
    try:
        yield
    finally:
        _in_use = before


def fma_peak(seconds: float = 0.2) -> float:
    """Floating-point operations per second of one thread that only multiplies and adds in registers."""
    return float(_function("fma_peak", instruction_set())(ctypes.c_double(seconds)))


def call(name: str, *arguments: ctypes.Structure) -> int:
    """Run a kernel on the instruction set in use; returns its number, if it has one."""
    function = _function(name, instruction_set(), *map(type, arguments))
    return int(function(*map(ctypes.byref, arguments)) or 0)


def view(x: Tensor) -> TensorView:
    """Describe a tensor of four axes whose last one is contiguous."""
    return TensorView(address(x), x.stride()[:3])


def readable(x: Tensor) -> Tensor:
    """Copy a tensor whose last axis is not contiguous; any other strides will do."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def address(x: Tensor | None) -> int | None:
    """Where a contiguous tensor lies; nowhere if it is absent."""
    if x is None:
        return None
    if not x.is_cpu:
        raise ValueError(f"a tensor is on {x.device}, but all of them must be on the CPU, like q")
    return x.data_ptr()


@cache
def _library() -> Any:
    """Load the library; the reason as a string if that fails."""
    found = sorted(Path(__file__).parent.glob("unrolled_native.*"))
    if not found:
        return "the C++ kernels were not built when unrolled was installed"
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"the library of CPU kernels does not load: {error}"
    library.instruction_sets.restype = ctypes.c_char_p
    return library


@cache
def _function(name: str, instruction_set: str, *structs: type[ctypes.Structure]) -> Any:
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(library)
    try:
        function = library[f"{name}_{instruction_set}"]
        sizes = [INT.in_dll(library, f"sizeof_{struct.__name__}").value for struct in structs]
    except (AttributeError, ValueError):
        sizes = None
    if sizes != [ctypes.sizeof(struct) for struct in structs]:
        raise RuntimeError("the library of CPU kernels is of another version; install unrolled again")
    function.restype = _RESULTS.get(name)
    return function
