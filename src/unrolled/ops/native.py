"""The library of C++ kernels for CPUs: whether it is built, which instruction set it uses, and calls into it.

The sources are in `native/`. They include no header of PyTorch or Python, and are built when the package is
installed on a machine with a compiler. They are compiled with OpenMP but linked to no OpenMP runtime, so the
threads are those of torch.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from struct import calcsize

import torch
from torch import Tensor

from unrolled.ops.checks import check_offsets
from unrolled.ops.structs import Layout, code, enums, layouts

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

View = tuple[int, int, int, int]  # the struct `Tensor` of native/arguments.h

# The result types of functions that do not return the `Status` of native/arguments.h.
_RESULTS = {"fma_peak": ctypes.c_double, "linear_saved_floats": ctypes.c_int64}
_SUCCESS = 0

_in_use: str | None = None


def available() -> bool:
    """Whether the kernels can be used."""
    return missing() is None


# The mark of `torch.compiler.assume_constant_result`, without importing the compiler. torch.compile then does
# not trace the loading of the library, which would break the graph.
vars(available)["_dynamo_marked_constant"] = True


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
    """Use the kernels of another instruction set, in tests."""
    global _in_use
    if name not in instruction_sets():
        raise ValueError(f"instruction set is {name!r}, but must be one of {', '.join(instruction_sets())}")
    before, _in_use = _in_use, name
    try:
        yield
    finally:
        _in_use = before


def fma_peak(seconds: float = 0.2) -> float:
    """Measure the floating-point operations per second of one thread whose operands stay in registers."""
    return float(_function("fma_peak", instruction_set())(ctypes.c_double(seconds)))


def struct(name: str) -> Callable[..., bytes]:
    """Return the function that packs a struct of `native/arguments.h`; null pointers are 0."""
    return _layouts()[name].pack


def struct_size(name: str) -> int:
    """Return the bytes of a struct of `native/arguments.h`."""
    return calcsize(_layouts()[name].format)


def enum(name: str) -> dict[str, int]:
    """Return the values of an enum of `native/arguments.h`, by their names."""
    return _enums()[name]


def call(name: str, *structs: bytes) -> None:
    """Run a kernel on the instruction set in use.

    Raises:
        MemoryError: the kernel could not allocate its workspace. The outputs written so far are invalid.
    """
    if _function(name, instruction_set())(*structs) != _SUCCESS:
        raise MemoryError(f"the CPU kernel {name} could not allocate its workspace")


def linear_saved_floats(linear: bytes) -> int:
    """Return the size of the scratch memory `states` that `linear_backward` needs, in floats."""
    return int(_function("linear_saved_floats", instruction_set())(linear))


def common_type(*inputs: Tensor) -> int:
    """Return the number of the dtype that all inputs of a kernel have.

    Raises:
        ValueError: they have different dtypes; the kernel would read wrong numbers, and out of bounds.
    """
    dtype = inputs[0].dtype
    if any(x.dtype != dtype for x in inputs):
        found = ", ".join(str(x.dtype) for x in inputs)
        raise ValueError(f"the inputs of a CPU kernel are {found}, but must have one dtype")
    return TYPES[dtype]


def sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the fields that the structs of attention share, for `q [...,H,R]` and `k`, `v [...,G,M]`."""
    (H, R), (G, M) = q.shape[-2:], v.shape[-2:]
    shape = {"heads": H, "groups": G, "features": R, "values": M}
    return shape | {"type": common_type(q, k, v), "threads": torch.get_num_threads()}


def view(x: Tensor) -> View:
    """Describe a tensor `[batch, tokens, heads, width]` whose last axis is contiguous."""
    batch, token, head, _ = x.stride()
    return address(x), batch, token, head


def view_without_heads(x: Tensor) -> View:
    """Describe a tensor `[batch, tokens, width]` whose last axis is contiguous."""
    batch, token, _ = x.stride()
    return address(x), batch, token, 0


def readable(x: Tensor) -> Tensor:
    """Copy a tensor whose last axis is not contiguous; the other axes may have any strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def sequences(cu_seqlens: Tensor | None, rows: int, total: int) -> tuple[int, Tensor | None]:
    """Return the number of sequences, and their offsets if they are packed.

    Raises:
        ValueError: offsets with which a kernel would read and write out of bounds.
    """
    if cu_seqlens is None:
        return rows, None
    check_offsets(cu_seqlens.tolist(), total)
    return cu_seqlens.shape[0] - 1, cu_seqlens.contiguous()


def floats(*sizes: int) -> Tensor:
    """Make a tensor of fp32 on the CPU, without values, whatever types and devices torch has by default."""
    return torch.empty(sizes, dtype=torch.float32, device="cpu")


def address(x: Tensor | None) -> int:
    """Return the address of a contiguous tensor, 0 for None."""
    if x is None:
        return 0
    if not x.is_cpu:
        raise ValueError(f"a tensor is on {x.device}, but must be on the CPU like q")
    return x.data_ptr()


@cache
def _library() -> ctypes.CDLL | str:
    """Load the library; return the reason as a string if that fails."""
    found = sorted(Path(__file__).parent.glob("unrolled_native.*"))
    if not found:
        return "the C++ kernels were not built when unrolled was installed"
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"the library of CPU kernels does not load: {error}"
    library.instruction_sets.restype = library.arguments_header.restype = ctypes.c_char_p
    if _outdated(library):
        reason = "the C++ kernels were built from other sources: install unrolled again"
        warnings.warn(f"{reason}; until then, everything runs in plain PyTorch", stacklevel=2)
        return reason
    return library


def _outdated(library: ctypes.CDLL) -> bool:
    """Whether the sources of an editable installation were changed after the library was built."""
    source = Path(__file__).parents[3] / "native" / "arguments.h"
    return source.is_file() and code(source.read_text()) != code(library.arguments_header().decode())


def _symbol(name: str) -> "ctypes._NamedFuncPointer":
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(library)
    try:
        return library[name]
    except AttributeError:
        raise RuntimeError(
            "the library of CPU kernels is of another version; install unrolled again"
        ) from None


@cache
def _function(name: str, instruction_set: str) -> "ctypes._NamedFuncPointer":
    function = _symbol(f"{name}_{instruction_set}")
    function.restype = _RESULTS.get(name, ctypes.c_int32)
    return function


@cache
def _layouts() -> dict[str, Layout]:
    return layouts(header())


@cache
def _enums() -> dict[str, dict[str, int]]:
    return enums(header())


@cache
def header() -> str:
    """Return the text of `native/arguments.h` that the library was compiled from."""
    function = _symbol("arguments_header")
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()
