"""The short convolution of transformers, by the kernel of `causal_conv`.

The functions have the names, arguments and results of those in the modelling files of transformers, where
the channel axis comes before the token axis: `[B,C,T]`.
"""

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from unrolled.interop.hf._packing import refuse_packing
from unrolled.ops.conv import causal_conv


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> Tensor:
    """Filter `[B,C,T]` by the taps `weight [C,W]`, add `bias [C]` and apply the activation."""
    refuse_packing("causal_conv1d_fn", kwargs)
    function: Literal["silu"] | None = "silu" if activation == "silu" else None
    y, _ = causal_conv(hidden_states.mT, weight, bias=bias, activation=function)
    return (y if activation == function else _function(activation)(y)).mT


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Filter the next few tokens `[B,C,T]`, and update `conv_state [B,C,W]` in place."""
    T, W = hidden_states.shape[2], weight.shape[1]
    inputs = torch.cat([conv_state, hidden_states], dim=2)
    conv_state.copy_(inputs[..., -conv_state.shape[2] :])
    windows = inputs[..., -(T + W - 1) :].float().unfold(2, W, 1)
    y = (windows * weight.float().unsqueeze(1)).sum(-1)
    if bias is not None:
        y = y + bias.unsqueeze(-1)
    return _function(activation)(y).to(hidden_states.dtype)


@cache
def _function(activation: str | None) -> Callable[[Tensor], Tensor]:
    function: Callable[[Tensor], Tensor] = ACT2FN["linear" if activation is None else activation]
    return function
