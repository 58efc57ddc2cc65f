"""Choice of the backend that runs an operation: the fastest that supports the arguments, or the one named."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from torch import Tensor
from torch.nn import Parameter

from unrolled.ops import native
from unrolled.ops.checks import wrong
from unrolled.ops.observing import observed

_preferred: str | None = None


class Backend(Protocol):
    """The module of a backend."""

    @property
    def supports(self) -> Callable[..., bool]:
        """Return whether it can run these arguments."""


AnyBackend = TypeVar("AnyBackend", bound=Backend)


@contextmanager
def prefer(backend: str) -> Iterator[None]:
    """Prefer this backend where it supports the arguments and no other is named; for tests."""
    global _preferred
    before, _preferred = _preferred, backend
    try:
        yield
    finally:
        _preferred = before


def prefers(backend: str) -> bool:
    """Whether no other backend than this one is preferred."""
    return _preferred in (None, backend)


def runs_native(*tensors: Tensor | None) -> bool:
    """Whether a C++ kernel may take these tensors in an autograd function, which is no operator of torch."""
    fit = (
        type(x) in (Tensor, Parameter) and x.is_cpu and x.dtype in native.TYPES
        for x in tensors
        if x is not None
    )
    return prefers("native") and native.available() and all(fit) and not observed()


def check_backend(backend: str | None, backends: Mapping[str, object]) -> None:
    """Require the name of a backend, or None."""
    if backend is not None and backend not in backends:
        raise wrong("backend", repr(backend), f"None for the fastest or one of {', '.join(backends)}")


def choose(
    backends: Mapping[str, AnyBackend], backend: object, like: Tensor, *arguments: object
) -> AnyBackend:
    """Return the first backend, or the one named, that supports `arguments`; errors describe `like`."""
    for name in sorted(backends, key=lambda name: name != _preferred):
        if backend in (None, name) and backends[name].supports(*arguments):
            return backends[name]
    found = f"{like.dtype} tensors of these shapes on {like.device}"
    raise ValueError(f"backend is {backend!r}, which cannot run {found}; use None for one that can")
