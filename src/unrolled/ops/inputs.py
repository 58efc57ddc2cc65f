"""The check of a module's input."""

from collections.abc import Sequence

from torch import Tensor

from unrolled.ops.checks import check_device, shape
from unrolled.ops.precision import autocast_dtype


def check_input(name: str, x: object, axes: Sequence[str | int], weight: Tensor | None) -> None:
    """Require a tensor with these axes, on the device and in the dtype of `weight`.

    Only the size of the last axis is checked. Another dtype is accepted under autocast. Without a weight, any
    floating-point dtype is accepted.

    Raises:
        ValueError: `x` is not such a tensor; the message names it.
    """
    sizes = f"[{', '.join(map(str, axes))}]"
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, but must be a tensor {sizes}")
    if x.dim() != len(axes) or x.shape[-1] != axes[-1]:
        raise ValueError(f"{name} has shape {shape(x)}, but must be {sizes}")
    if weight is not None:
        check_device(name, x, weight)
    wrong = not x.is_floating_point() if weight is None else x.dtype != weight.dtype
    if wrong and autocast_dtype(x.device) is None:
        other = "no floating-point type" if weight is None else f"but the weights are {weight.dtype}"
        raise ValueError(f"{name} is {x.dtype}, {other}: convert one, or use autocast")
