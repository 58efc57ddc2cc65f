"""Functions that `torch.export` keeps as one operator if the length is dynamic.

A graph with a dynamic length cannot loop over chunks or branch on their number. A function that does so
becomes one operator in such a graph, and the operator runs the function's Python code. Everywhere else, the
function is called directly.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from unrolled.ops.precision import accumulation_dtype

P = ParamSpec("P")
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])


def any_length(x: Tensor) -> bool:
    """Whether the length of `x [B,T,...]` is a `torch.SymInt` during `torch.export`."""
    return torch.compiler.is_exporting() and isinstance(x.shape[1], torch.SymInt)


def like_attention(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """Return an empty `o [B,T,H,M]` for `q [B,T,H,D]` and `v [B,S,G,M]`."""
    return v.new_empty(*q.shape[:3], v.shape[3])


def like_attention_and_lse(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return an empty `o [B,T,H,M]`, and the empty log-sum-exp of its scores, `[B,T,H]`."""
    return like_attention(q, k, v), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def like_recurrence(
    q: Tensor, k: Tensor, v: Tensor, *_: object, cu_seqlens: Tensor | None = None, **__: object
) -> tuple[Tensor, Tensor]:
    """Return an empty `o [B,T,H,M]`, and empty states `[N,G,D,M]` of the N sequences."""
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1  # sizes may be symbols
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    after = k.new_empty(rows, *k.shape[2:], v.shape[3], dtype=dtype)
    return v.new_empty(*q.shape[:3], v.shape[3]), after


def one_node(result: Callable[..., Result]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Make a function of tensors, numbers, strings and dataclasses one operator in a graph of dynamic length.

    The operator is called `unrolled::` followed by the name of the function. It has no gradient, since such a
    graph is for inference. A process that loads such a graph must first import the module of the function.
    The first argument of the function is a tensor `[B,T,...]`, whose length T may be dynamic.

    Args:
        result: takes the same arguments, and returns empty results of the right shapes and dtypes.
    """

    def wrap(function: Callable[P, Result]) -> Callable[P, Result]:
        taken = inspect.signature(function)
        annotations = {name: x.annotation for name, x in taken.parameters.items()}
        layouts: dict[str, Any] = {name: kind for name, kind in annotations.items() if is_dataclass(kind)}
        # An operator has no keyword-only tensors; a dataclass is passed as JSON.
        parameters = [
            x.replace(kind=x.POSITIONAL_OR_KEYWORD, annotation=str if name in layouts else x.annotation)
            for name, x in taken.parameters.items()
        ]
        signature = taken.replace(parameters=parameters)

        def run(*args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
            given = signature.bind(*args, **kwargs).arguments
            given |= {name: kind(**json.loads(given[name])) for name, kind in layouts.items()}
            found = function(**given)  # type: ignore[call-arg]
            return _fresh(found) if isinstance(found, Tensor) else tuple(map(_fresh, found))

        run.__signature__ = signature  # type: ignore[attr-defined]
        operator: Any = torch.library.custom_op(f"unrolled::{function.__name__}", run, mutates_args=())
        operator.register_fake(result)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            first: Any = args[0] if args else next(iter(kwargs.values()))
            if not any_length(first):
                return function(*args, **kwargs)
            given = taken.bind(*args, **kwargs).arguments
            given |= {name: json.dumps(asdict(given[name])) for name in layouts}
            found: Result = operator(**given)
            return found

        return call

    return wrap


def _fresh(x: Tensor) -> Tensor:
    """Make a result contiguous and distinct from all inputs, as an operator requires."""
    return x.clone(memory_format=torch.contiguous_format)
