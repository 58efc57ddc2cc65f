"""A token through a transformer block on a CPU: hands the tensors to the C++ kernel, mirroring its struct."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from unrolled.ops.feature_maps import FeatureMap
from unrolled.ops.kernels import dense_native, native
from unrolled.ops.kernels.door import prefers
from unrolled.ops.kernels.linear_native import FEATURE_MAPS, LinearStep
from unrolled.ops.kernels.native import FLAG, FLOAT, INT, POINTER, TYPES

WIDEST = 16  # floats in a vector: widths have to be multiples of it
MOST_ROWS = dense_native.MOST_ROWS[torch.float32]
ACTIVATIONS = ("gelu", "relu", "swiglu")
LAYERS = ("attention_norm", "feed_forward_norm", "qkv", "out", "up", "down")


class BlockStep(ctypes.Structure):
    """`BlockStep` of `native/problem.h`."""

    _fields_ = [
        *((name, INT) for name in ("width", "hidden")),
        *((name, FLAG) for name in ("pre_norm", "root_mean_square", "activation")),
        ("epsilon", FLOAT),
        *((f"{layer}_{name}", POINTER) for layer in LAYERS for name in ("weights", "bias")),
        ("attention", LinearStep),
        *((name, POINTER) for name in ("x", "y")),
    ]


class Options(NamedTuple):
    """What a block is, apart from its weights."""

    heads: int
    groups: int
    values: int  # width of a head's
    pre_norm: bool
    root_mean_square: bool
    epsilon: float
    activation: str
    feature_map: FeatureMap


def supports(
    x: Tensor, kv: Tensor, k_sum: Tensor, weights: Sequence[Tensor | None], options: Options
) -> bool:
    """Whether the kernel can run these tensors, and is the fastest way to."""
    heads, groups, values, *_, activation, feature_map = options
    if x.dim() != 2 or type(feature_map) not in FEATURE_MAPS:
        return False
    (B, width), features = x.shape, feature_map.feature_dim
    down = weights[2 * LAYERS.index("down")]
    if not 0 < B <= MOST_ROWS or heads == 0 or down is None or down.dim() != 2:
        return False
    hidden = down.shape[1]
    if width % WIDEST or hidden % WIDEST:
        return False
    outputs = (
        (heads + groups) * features + groups * values,
        width,
        hidden * (1 + (activation == "swiglu")),
        width,
    )
    inputs = (width, heads * values, width, hidden)
    shapes: list[tuple[int, ...]] = [(width,)] * 4
    for o, i in zip(outputs, inputs, strict=True):
        shapes += [(o, i), (o,)]
    if any(w is None for w in weights[::2]):  # only a bias may be absent
        return False
    shapes += [(B, groups, features, values), (B, groups, features), (B, width)]
    for tensor, shape in zip((*weights, kv, k_sum, x), shapes, strict=True):
        if tensor is not None and not dense_native.fits(tensor, shape, torch.float32):
            return False
    return prefers("native") and native.available()


def step(
    x: Tensor, kv: Tensor, k_sum: Tensor, weights: Sequence[Tensor | None], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the block's output for `x [B, d_model]`, and the state of its attention after this token.

    `weights` holds the weights and the biases, which may be absent, of `LAYERS`, in this order.
    """
    y, kv_after, k_sum_after = torch.empty_like(x), torch.empty_like(kv), torch.empty_like(k_sum)
    heads, _, _, pre_norm, root_mean_square, epsilon, activation, feature_map = options
    hidden = cast(Tensor, weights[-2]).shape[1]
    flags = (TYPES[x.dtype], True, torch.get_num_threads(), FEATURE_MAPS[type(feature_map)])
    sizes, inside = (x.shape[0], heads, *kv.shape[1:]), (0, 0, 0, 0)  # q, k, v, without log_decay
    before, after = (kv.data_ptr(), k_sum.data_ptr()), (kv_after.data_ptr(), k_sum_after.data_ptr())
    attention = LinearStep(*sizes, *flags, *inside, *inside, *inside, None, *before, None, *after)
    kinds = (pre_norm, root_mean_square, ACTIVATIONS.index(activation), epsilon)
    pointers = [None if w is None else w.data_ptr() for w in weights]
    block = BlockStep(x.shape[1], hidden, *kinds, *pointers, attention, x.data_ptr(), y.data_ptr())
    native.call("block_step", block)
    return y, kv_after, k_sum_after
