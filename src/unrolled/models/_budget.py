"""A limit on what building a model may allocate, so that a damaged config cannot fill the memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

SLACK = 2**20  # elements, for small models
FACTOR = 16  # initialising a weight takes several operations, each with a result of its size


class OverBudgetError(Exception):
    """Building the model would allocate more than its weights file can hold."""


@contextmanager
def budget(n_elements: int) -> Iterator[None]:
    """Limit what the block allocates to a multiple of `n_elements`, the size of the weights to be loaded.

    Raises:
        OverBudgetError: the block allocates more; a single large tensor is refused before it is allocated.
    """
    with _Budget(FACTOR * n_elements + SLACK):
        yield


class _Budget(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    def __init__(self, left: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = left

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch._dynamo, which takes a second

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if _requested(func, args) > self.left:
            raise OverBudgetError
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not any(_same_memory(result, x) for x in args):
            self.left -= result.numel()
            if self.left < 0:
                raise OverBudgetError
        return result


def _requested(func: OpOverload[..., object], args: tuple[object, ...]) -> int:
    """Number of elements that an operator is about to allocate, where it is given a shape or a range."""
    if func.overloadpacket is torch.ops.aten.arange:
        return max((n for n in args if isinstance(n, int)), default=0)
    shapes = [x for x in args if isinstance(x, list | tuple) and all(isinstance(n, int) for n in x)]
    return max((math.prod(shape) for shape in shapes), default=0)


def _same_memory(a: Tensor, b: object) -> bool:
    return isinstance(b, Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata
