"""The dtypes that computations are done in."""

from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor, nn

from unrolled.ops.observing import changed


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of sums and states: fp64 for fp64 inputs, fp32 for all narrower ones."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def accumulated(x: Tensor) -> Tensor:
    """Convert to the dtype of sums: fp64 stays, and narrower types become fp32."""
    return x.to(accumulation_dtype(x.dtype))


def finite_exp(x: Tensor) -> Tensor:
    """exp(x) in at least fp32, and at most exp(80): an infinite rate times a step of size 0 would be NaN."""
    return accumulated(x).clamp(max=80).exp()


def promoted(*xs: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to their common promoted dtype."""
    dtype = reduce(torch.promote_types, (x.dtype for x in xs))
    return tuple(x.to(dtype) for x in xs)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, so that sums keep their dtype; the meta device has no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes products in, or None without autocast."""
    enabled = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None


def exact_dtype(device: torch.device) -> torch.dtype:
    """Dtype of summed gates and angles, which need precision: fp64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    """Call a layer in the dtype of `x`; a layer with a hook, or another kind of layer, in its own."""
    dtype = next(layer.parameters(), x).dtype
    if dtype != x.dtype and not changed([layer]):
        if type(layer) is nn.Linear:
            bias = None if layer.bias is None else layer.bias.to(x.dtype)
            return nn.functional.linear(x, layer.weight.to(x.dtype), bias)
        if type(layer) is nn.LayerNorm:
            weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
            return nn.functional.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    y: Tensor = layer(x.to(dtype))
    return y.to(x.dtype)
