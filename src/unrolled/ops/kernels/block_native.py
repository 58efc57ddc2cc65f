"""A token through a transformer block on a CPU: hands the tensors to the C++ kernel, mirroring its struct."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.feature_maps import FeatureMap
from unrolled.ops.kernels import dense_native, native
from unrolled.ops.kernels.door import prefers
from unrolled.ops.kernels.linear_native import FEATURE_MAPS, Step
from unrolled.ops.kernels.native import TYPES

WIDEST = 16  # floats in a vector: widths have to be multiples of it
MOST_ROWS = dense_native.MOST_ROWS[torch.float32]
ACTIVATIONS = ("gelu", "relu", "swiglu")
LAYERS = ("attention_norm", "feed_forward_norm", "qkv", "out", "up", "down")

_INT, _FLAG, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class _BlockStep(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("width", "hidden")),
        *((name, _FLAG) for name in ("pre_norm", "root_mean_square", "activation")),
        ("epsilon", _FLOAT),
        *((f"{layer}_{name}", _POINTER) for layer in LAYERS for name in ("weights", "bias")),
        ("attention", Step),
        *((name, _POINTER) for name in ("x", "y")),
    ]


class Options(NamedTuple):
    """What a block is, apart from its weights."""

    heads: int
    groups: int
    values: int  # width of a head's
    hidden: int  # width between the two layers of the feed-forward one
    pre_norm: bool
    root_mean_square: bool
    epsilon: float
    activation: str
    feature_map: FeatureMap


def supports(
    x: Tensor, kv: Tensor, k_sum: Tensor, weights: Sequence[Tensor | None], options: Options
) -> bool:
    """Whether the kernel can run these tensors, and is the fastest way to."""
    groups, values, hidden = options.groups, options.values, options.hidden
    B, width, features = x.shape[0], x.shape[-1], options.feature_map.feature_dim
    if x.dim() != 2 or not 0 < B <= MOST_ROWS or type(options.feature_map) not in FEATURE_MAPS:
        return False
    if width % WIDEST or hidden % WIDEST or weights[0] is None or weights[0].shape != x.shape[1:]:
        return False
    if kv.shape != (B, groups, features, values) or k_sum.shape != kv.shape[:3]:
        return False
    for tensor in (x, kv, k_sum, *weights):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            return False
    return prefers("native") and native.available()


def step(
    x: Tensor, kv: Tensor, k_sum: Tensor, weights: Sequence[Tensor | None], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the block's output for `x [B, d_model]`, and the state of its attention after this token.

    `weights` holds the weights and the biases, which may be absent, of `LAYERS`, in this order.
    """
    y, kv_after, k_sum_after = torch.empty_like(x), torch.empty_like(kv), torch.empty_like(k_sum)
    heads, _, _, hidden, pre_norm, root_mean_square, epsilon, activation, feature_map = options
    flags = (TYPES[x.dtype], True, torch.get_num_threads(), FEATURE_MAPS[type(feature_map)])
    sizes, inside = (x.shape[0], heads, *kv.shape[1:]), (0, 0, 0, 0)  # q, k, v, without log_decay
    before, after = (kv.data_ptr(), k_sum.data_ptr()), (kv_after.data_ptr(), k_sum_after.data_ptr())
    attention = Step(*sizes, *flags, *inside, *inside, *inside, None, *before, None, *after)
    kinds = (pre_norm, root_mean_square, ACTIVATIONS.index(activation), epsilon)
    pointers = [None if w is None else w.data_ptr() for w in weights]
    block = _BlockStep(x.shape[1], hidden, *kinds, *pointers, attention, x.data_ptr(), y.data_ptr())
    native.call("block_step", block)
    return y, kv_after, k_sum_after
