"""A token through transformer blocks on a CPU: passes the tensors to the C++ kernel."""

import ctypes
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Size, Tensor

from unrolled.ops import native
from unrolled.ops.dense import native as dense_native
from unrolled.ops.dispatch import prefers
from unrolled.ops.feature_maps import FeatureMap
from unrolled.ops.linear.native import FEATURE_MAPS

WIDEST = 16  # floats in the widest vector; all widths must be multiples
MOST_ROWS = dense_native.MOST_ROWS[torch.float32]
ACTIVATIONS = ("gelu", "relu", "swiglu")
LAYERS = ("attention_norm", "feed_forward_norm", "qkv", "out", "up", "down")

Array = tuple[int, Size]  # address and shape of contiguous floats


class Options(NamedTuple):
    """The description of a block without its weights."""

    heads: int
    groups: int
    features: int  # per head
    values: int  # per head
    pre_norm: bool
    root_mean_square: bool
    epsilon: float
    activation: str
    feature_map: type[FeatureMap]


class Plan(NamedTuple):
    """A block in the form that the kernel reads.

    Attributes:
        struct: its description, which points to the weights and does not keep them alive.
        width: of the residual stream.
        state: the shape of its state S, without the batch.
    """

    struct: ctypes.Array[ctypes.c_char]
    width: int
    state: tuple[int, int, int]


def arrays(tensors: Iterable[Tensor | None]) -> tuple[Array | None, ...] | None:
    """Return the address and shape of each tensor, None for None; None if the kernel cannot read one."""
    found: list[Array | None] = []
    for x in tensors:
        if x is None:
            found.append(None)
        elif x.dtype is torch.float32 and x.is_cpu and x.layout is torch.strided and x.is_contiguous():
            found.append((x.data_ptr(), x.shape))
        else:
            return None
    return tuple(found)


@lru_cache(maxsize=1024)  # filling the struct takes longer than the rest of what Python does for a block
def plan(options: Options, weights: tuple[Array | None, ...]) -> Plan | None:
    """Describe a block; None if the kernel cannot run it.

    `weights` holds the weight and the bias, which may be absent, of each of `LAYERS`, in this order.
    """
    heads, groups, features, values, pre_norm, root_mean_square, epsilon, activation, feature_map = options
    qkv, down = weights[2 * LAYERS.index("qkv")], weights[2 * LAYERS.index("down")]
    if heads == 0 or activation not in ACTIVATIONS or feature_map not in FEATURE_MAPS:
        return None
    if qkv is None or down is None or len(qkv[1]) != 2 or len(down[1]) != 2:
        return None
    width, hidden = qkv[1][1], down[1][1]
    if width % WIDEST or hidden % WIDEST:
        return None
    projected = (heads + groups) * features + groups * values
    outputs = (projected, width, hidden * (1 + (activation == "swiglu")), width)
    inputs = (width, heads * values, width, hidden)
    shapes: list[tuple[int, ...]] = [(width,)] * 4
    for o, i in zip(outputs, inputs, strict=True):
        shapes += [(o, i), (o,)]
    if any(w is None for w in weights[::2]):  # only a bias may be absent
        return None
    if any(w is not None and w[1] != shape for w, shape in zip(weights, shapes, strict=True)):
        return None
    pointers = [0 if w is None else w[0] for w in weights]
    struct = native.struct("TransformerBlock")(
        width=width,
        hidden=hidden,
        heads=heads,
        groups=groups,
        features=features,
        values=values,
        pre_norm=pre_norm,
        root_mean_square=root_mean_square,
        activation=ACTIVATIONS.index(activation),
        feature_map=FEATURE_MAPS[feature_map],
        epsilon=epsilon,
        **dict(zip(LAYERS, zip(pointers[::2], pointers[1::2], strict=True), strict=True)),
    )
    return Plan(ctypes.create_string_buffer(struct), width, (groups, features, values))


def available() -> bool:
    """Whether the kernel is built, and no other backend is preferred."""
    return prefers("native") and native.available()


def step(
    x: Tensor, plans: Sequence[Plan], kvs: Sequence[Tensor], k_sums: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Compute the output of the last block for `x [B, width]`, and the new states of all blocks."""
    y, n = torch.empty_like(x), len(plans)
    kvs_after, k_sums_after = [torch.empty_like(s) for s in kvs], [torch.empty_like(s) for s in k_sums]
    pointers = ctypes.c_void_p * n
    blocks = pointers(*(ctypes.addressof(plan.struct) for plan in plans))
    states = [pointers(*(s.data_ptr() for s in some)) for some in (kvs, k_sums, kvs_after, k_sums_after)]
    kv, k_sum, kv_after, k_sum_after = map(ctypes.addressof, states)
    problem = native.struct("StackStep")(
        batch=x.shape[0],
        blocks=n,
        threads=torch.get_num_threads(),
        block=ctypes.addressof(blocks),
        kv=kv,
        k_sum=k_sum,
        kv_after=kv_after,
        k_sum_after=k_sum_after,
        x=x.data_ptr(),
        y=y.data_ptr(),
    )
    native.call("stack_step", problem)
    return y, kvs_after, k_sums_after
