"""The check of a module's input."""

from collections.abc import Sequence

from torch import Tensor

from unrolled.ops.checks import check_device, shape
from unrolled.ops.precision import autocast_dtype


def check_input(name: str, x: object, axes: Sequence[str | int], weight: Tensor | None) -> None:
    """Require a tensor with these axes that matches `weight`; see `check_matches`.

    Only the size of the last axis is checked. Without a weight, any floating-point dtype is accepted.

    Raises:
        ValueError: `x` is not such a tensor; the message names it.
    """
    sizes = f"[{', '.join(map(str, axes))}]"
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, but must be a tensor {sizes}")
    if x.dim() != len(axes) or x.shape[-1] != axes[-1]:
        raise ValueError(f"{name} has shape {shape(x)}, but must be {sizes}")
    if weight is not None:
        check_matches(name, x, weight)
    elif not x.is_floating_point() and autocast_dtype(x.device) is None:
        raise ValueError(f"{name} is {x.dtype}, no floating-point type: convert one, or use autocast")


def check_matches(name: str, x: Tensor, weight: Tensor) -> None:
    """Require a tensor on the device and in the dtype of `weight`; under autocast, in any dtype.

    Raises:
        ValueError: `x` is not such a tensor; the message names it.
    """
    check_device(name, x, weight)
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        raise ValueError(
            f"{name} is {x.dtype}, but the weights are {weight.dtype}: convert one, or use autocast"
        )
