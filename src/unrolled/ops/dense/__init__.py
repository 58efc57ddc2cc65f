"""Linear layers that are fast for a few rows too, as in a step of generation, and on every processor."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.ops.dense import native, onednn
from unrolled.ops.observing import changed, inferring
from unrolled.ops.precision import autocast_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b, as `torch.nn.functional.linear`: `x [..., in]`, `weight [out, in]` -> `[..., out]`.

    With few rows, most of the time goes into reading W, which torch's matrix products do not read in memory
    order. So a separate kernel computes these products in eager inference on a CPU. With many rows in fp32,
    oneDNN computes them on AMD's processors, where it is up to twice as fast.
    """
    eager = inferring(x, weight, bias) and autocast_dtype(x.device) is None
    if eager and native.supports(x, weight, bias):
        return native.linear(x, weight, bias)
    if onednn.supports(x, weight, bias):
        return onednn.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Layer(nn.Module):
    """A module whose call returns a tensor; torch's annotation leaves open what a call returns."""

    __call__: Callable[..., Tensor]


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return linear(x, self.weight, self.bias)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is just its weight and bias, without a hook, and not replaced, as by an adapter."""
    return type(layer) is Linear and not changed([layer])


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight of a layer, or the first parameter of a module in its place, such as an adapter.

    A module without parameters counts as one of the default dtype on the CPU.
    """
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) else next(layer.parameters(), torch.empty(0))


def linear_part(layer: Linear, widths: list[int], part: int, x: Tensor) -> Tensor:
    """Apply a layer whose outputs have parts of `widths`; return one part: `[..., in]` -> `[..., width]`.

    Only this part is computed, unless the layer has a hook or was replaced.
    """
    if not is_plain(layer):
        y: Tensor = layer(x)
        return y.split_with_sizes(widths, -1)[part]
    bias = None if layer.bias is None else torch.split(layer.bias, widths)[part]
    return linear(x, torch.split(layer.weight, widths)[part], bias)
