"""A step of many blocks in one kernel, where possible: eager inference with linear attention on a CPU.

Layer by layer, a step spends more time in Python than in reading the weights. The kernel computes the same as
`Block.step`; blocks with hooks, or with layers of another type or shape, run `Block.step`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.attention.linear import LinearAttention, LinearAttentionState
from unrolled.models.blocks import AttentionBlock, Block, FeedForward
from unrolled.models.checks import changed
from unrolled.ops import stack_step as stack_native
from unrolled.ops.checks import observed, plain
from unrolled.ops.dense import Linear
from unrolled.ops.stack_step import Plan

_STEP = Block.step  # to notice that it has been replaced, as by a profiler


def step(
    blocks: Sequence[AttentionBlock], x: Tensor, states: Sequence[object]
) -> tuple[Tensor, list[LinearAttentionState]]:
    """Run as many of the first blocks as the kernel supports; return their output and their states.

    If it supports none, returns `x` itself and no states.
    """
    # whether the kernel can run now, on this input
    if observed() or not stack_native.available() or torch.is_autocast_enabled(x.device.type):
        return x, []
    if not plain([x]) or stack_native.arrays([x]) is None:
        return x, []
    if x.dim() != 2 or not 0 < x.shape[0] <= stack_native.MOST_ROWS:
        return x, []
    # the blocks and states that it supports, up to the first that it does not
    plans: list[Plan] = []
    read: list[LinearAttentionState] = []
    for block, state in zip(blocks, states, strict=True):
        plan = _plan(block)
        if plan is None or plan.width != x.shape[1] or (fitting := _fitting(state, x.shape[0], plan)) is None:
            break
        plans.append(plan)
        read.append(fitting)
    if not plans:
        return x, []
    x, kvs, k_sums = stack_native.step(x, plans, [s.kv for s in read], [s.k_sum for s in read])
    positions = [state.position + 1 for state in read]
    return x, list(map(LinearAttentionState, kvs, k_sums, positions))


def _plan(block: AttentionBlock) -> Plan | None:
    """Describe a block to the kernel; None if the kernel does not support it."""
    if type(block) is not Block or Block.step is not _STEP:
        return None
    # The dictionaries of a module are read directly: its attributes take ten times as long to find.
    parts: dict[str, Any] = block._modules
    attention, first, second, ff = (parts[name] for name in ("attention", "attention_norm", "ff_norm", "ff"))
    if type(attention) is not LinearAttention or type(ff) is not FeedForward:
        return None
    if block.norm == "res_post" or attention.rotary or not attention.normalize or not attention.causal:
        return None
    norm, dropout = type(first), parts["dropout"]
    if norm not in (nn.LayerNorm, nn.RMSNorm) or type(second) is not norm:
        return None
    if first.eps is None or first.eps != second.eps:
        return None
    if dropout.training and (type(dropout) is not nn.Dropout or dropout.p or changed([dropout])):
        return None
    inner, outer = attention._modules, ff._modules
    linears = (inner["qkv_proj"], inner["out_proj"], outer["up"], outer["down"])
    if any(type(linear) is not Linear for linear in linears):
        return None
    feature_map: Any = inner["feature_map"]
    layers: tuple[Any, ...] = (first, second, *linears)
    if changed((block, attention, feature_map, ff, *layers)):
        return None
    weights = []
    for layer in layers:
        for name in ("weight", "bias"):
            # "bias" may also be a buffer or a plain attribute, which the kernel would miss.
            if name not in layer._parameters and hasattr(layer, name):
                return None
            weights.append(layer._parameters.get(name))
    arrays = stack_native.arrays(weights) if plain(weights) else None
    if arrays is None:
        return None
    options = stack_native.Options(
        attention.n_heads,
        attention.n_kv_heads,
        feature_map.feature_dim,
        attention.value_dim,
        block.norm == "pre",
        norm is nn.RMSNorm,
        first.eps,
        ff.activation,
        type(feature_map),
    )
    return stack_native.plan(options, arrays)


def _fitting(state: object, batch: int, plan: Plan) -> LinearAttentionState | None:
    """Return a state of this block that the kernel may read; None for any other."""
    if type(state) is not LinearAttentionState or not plain(state):
        return None
    arrays = stack_native.arrays(state[:2])
    shapes = (batch, *plan.state), (batch, *plan.state[:2])
    fits = arrays is not None and tuple(x and x[1] for x in arrays) == shapes and state[2].shape == (batch,)
    return state if fits else None
