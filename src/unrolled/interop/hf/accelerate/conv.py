"""The short convolution of transformers, by the kernel of `causal_conv`.

The functions have the names, arguments and results of those in the modelling files of transformers, where
the channel axis comes before the token axis: `[B,C,T]`.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu
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
    y, _ = causal_conv(hidden_states.mT, weight)
    return _activated(y, bias, activation).mT


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
    y = (windows * weight.float().unsqueeze(1)).sum(-1).to(hidden_states.dtype)
    return _activated(y.mT, bias, activation).mT


def _activated(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Add the bias to `y [B,T,C]` and apply the activation, without copies that no gradient needs."""
    if bias is not None:
        y = y.add_(bias)
    if activation == "silu":
        return silu(y, inplace=not y.requires_grad)
    return y if activation is None else _function(activation)(y)


@cache
def _function(activation: str) -> Callable[[Tensor], Tensor]:
    function: Callable[[Tensor], Tensor] = ACT2FN[activation]
    return function
