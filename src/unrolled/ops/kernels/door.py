"""What the doors of the kernels share: which form runs, and derivatives of any order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_preferred: str | None = None


@contextmanager
def prefer(backend: str) -> Iterator[None]:
    """Take the form of this name first, where it can run and no other one is asked for: for tests."""
    global _preferred
    before, _preferred = _preferred, backend
    try:
        yield
    finally:
        _preferred = before


def prefers(backend: str) -> bool:
    """Whether no other form than this one is preferred."""
    return _preferred in (None, backend)


def check_backend(backend: str | None, forms: Mapping[str, Any]) -> None:
    """Require the name of a form, or None."""
    if backend is not None and backend not in forms:
        raise ValueError(
            f"backend is {backend!r}, but must be None for the fastest or one of {', '.join(forms)}"
        )


def choose(forms: Mapping[str, Any], backend: str | None, like: Tensor, *arguments: Any) -> Any:
    """Take the first form, or the one named, that supports `arguments`; the error describes `like`."""
    for name in sorted(forms, key=lambda name: name != _preferred):
        if backend in (None, name) and forms[name].supports(*arguments):
            return forms[name]
    found = f"{like.dtype} tensors of these shapes on {like.device}"
    raise ValueError(f"backend is {backend!r}, which cannot run {found}; None takes one that can")


def differentiable_gradients(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Differentiate a plain form, which is made of differentiable operations: right to any order.

    With respect to aliases: an input may itself be made from another one, and autograd adds up those paths.
    """
    aliases = [None if x is None else x.view_as(x) for x in inputs]
    outputs = run(*aliases)
    wanted = [x for x in aliases if x is not None and x.requires_grad]
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if pairs:
        ys, gs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, gs, create_graph=True, materialize_grads=True))
    else:  # nothing was computed: a pack of no sequences, queries that reach no key
        found = iter([torch.zeros_like(x) for x in wanted])
    return [next(found) if x is not None and x.requires_grad else None for x in aliases]
