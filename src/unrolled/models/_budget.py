"""A limit on what building a model may allocate, so that a damaged config cannot fill the memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SLACK = 2**20  # elements, for small models
FACTOR = 16  # initialising a weight takes several operations, each with a result of its size


class OverBudgetError(Exception):
    """Building the model would allocate more than its weights file can hold."""


@contextmanager
def budget(n_elements: int) -> Iterator[None]:
    """Limit the block to tensors in proportion to `n_elements`, the elements of the weights it is to hold.

    Raises:
        OverBudgetError: it makes more; a single large tensor is refused before it is allocated.
    """
    with _Budget(FACTOR * n_elements + SLACK):
        yield


class _Budget(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    def __init__(self, left: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _wanted(func, args) > self.left:
            raise OverBudgetError
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not any(_same_memory(result, x) for x in args):
            self.left -= result.numel()
            if self.left < 0:
                raise OverBudgetError
        return result


def _wanted(func: Any, args: tuple[Any, ...]) -> int:
    """Elements of the tensor that an operator is to make, where it is given a shape or a range."""
    if func.overloadpacket is torch.ops.aten.arange:
        return max((n for n in args if isinstance(n, int)), default=0)
    shapes = [x for x in args if isinstance(x, list | tuple) and all(isinstance(n, int) for n in x)]
    return max((math.prod(shape) for shape in shapes), default=0)


def _same_memory(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata
