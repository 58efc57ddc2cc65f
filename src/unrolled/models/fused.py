"""A step of a whole block in one kernel, where one fits: eager inference with linear attention on a CPU.

Layer by layer, a token spends more time in Python than it takes to read the weights. The kernel computes what
`Block.step` does; a block with hooks or with layers of another type or another shape is left to that.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from unrolled.attention.linear import LinearAttention, LinearAttentionState
from unrolled.ops.checks import inferring
from unrolled.ops.dense import Linear
from unrolled.ops.kernels import block_native

if TYPE_CHECKING:
    from unrolled.models.blocks import Block


def step(block: "Block", x: Tensor, state: Any) -> tuple[Tensor, LinearAttentionState] | None:
    """Do what `block.step(x, state)` does; None where the kernel cannot."""
    # The dictionaries of a module are asked here since its attributes take ten times as long to find.
    parts = block._modules
    attention: Any = parts["attention"]
    if type(attention) is not LinearAttention or type(state) is not LinearAttentionState:
        return None
    if attention.rotary or not attention.normalize or not attention.causal:
        return None
    ff: Any = parts["ff"]
    first: Any = parts["attention_norm"]
    second: Any = parts["ff_norm"]
    linears: list[Any] = [attention._modules[name] for name in ("qkv_proj", "out_proj")]
    linears += [ff._modules[name] for name in ("up", "down")]
    if type(first) not in (nn.LayerNorm, nn.RMSNorm) or type(second) is not type(first):
        return None
    if ff.activation not in block_native.ACTIVATIONS:
        return None
    if first.eps is None or first.eps != second.eps or {*map(type, linears)} != {Linear}:
        return None
    feature_map: Any = attention._modules["feature_map"]
    if _changed((attention, feature_map, ff, first, second, *linears)):
        return None
    weights = []
    for layer in (first, second, *linears):
        weights += [layer._parameters.get("weight"), layer._parameters.get("bias")]
    kv, k_sum, position = state
    if not inferring(x, kv, k_sum, *weights) or torch.is_autocast_enabled(x.device.type):
        return None
    if position.shape != x.shape[:1] or (block.dropout.training and block.dropout.p):
        return None
    options = block_native.Options(
        attention.n_heads,
        attention.n_kv_heads,
        attention.value_dim,
        block.pre,
        type(first) is nn.RMSNorm,
        first.eps,
        ff.activation,
        feature_map,
    )
    if not block_native.supports(x, kv, k_sum, weights, options):
        return None
    y, kv, k_sum = block_native.step(x, kv, k_sum, weights, options)
    return y, LinearAttentionState(kv, k_sum, position + 1)


def _changed(modules: Iterable[Any]) -> bool:
    """Whether these modules have another `forward`, or hooks to see what goes into them or comes out."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return True
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in modules)
