"""Functions that `torch.export` keeps as one operator where the length is not fixed.

A graph for every length has no loop over chunks and no branch on how many there are. A function with either
is one operator there, which runs its Python code; everywhere else it is called as it is.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])


def any_length(x: Tensor) -> bool:
    """Whether the length of `x [B,T,...]` is a symbol of `torch.export`, which stands for any number."""
    return torch.compiler.is_exporting() and isinstance(x.shape[1], torch.SymInt)


def like_attention(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """Make `o [B,T,H,M]` of `q [B,T,H,D]` and `v [B,S,G,M]`, without values."""
    return v.new_empty(*q.shape[:3], v.shape[3])


def one_node(result: Callable[..., Result]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Make a function of tensors, numbers, texts and dataclasses one operator in a graph for any length.

    The operator is `unrolled::` and the name of the function. It has no gradient: such a graph is for
    inference. A process that loads one has to have imported the file of the function.

    Args:
        result: makes results of the right shapes and types, without values, of the same arguments. The length
            is that of the first one.
    """

    def wrap(function: Callable[P, Result]) -> Callable[P, Result]:
        taken = inspect.signature(function)
        layouts: dict[str, Any] = {
            name: x.annotation for name, x in taken.parameters.items() if is_dataclass(x.annotation)
        }
        # An operator takes no tensor by its name alone, and a dataclass as a text.
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
    """An operator's results are contiguous, and none of its inputs."""
    return x.clone(memory_format=torch.contiguous_format)
