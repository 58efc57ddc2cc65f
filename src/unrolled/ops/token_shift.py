"""Mixtures of each token with the one before it, as in RWKV.

    x_t^z = x_t + mu_z * (x_{t-1} - x_t)

Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048, section 3.1 ("token
shift"); mu is 1 - mu there.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from unrolled.ops.checks import wrong
from unrolled.ops.conv import causal_conv_step
from unrolled.ops.sequence import causal_conv


def initial_mixtures(width: int, exponents: Iterable[float]) -> Tensor:
    """Return mu `[n,width]` as the first layer of the published models begins: 1 - (c / width)^exponent.

    So the channels range from those that read the token before to those that read the token itself.
    """
    share = torch.arange(width) / width
    return torch.stack([1 - share**exponent for exponent in exponents])


def mix_with_token_before(
    x: Tensor,
    mu: Tensor,
    last: Tensor | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix `x [B,T,C]`, or one token `[B,C]`.

    Args:
        x: 0 at padding.
        mu: `[n,C]`, of n mixtures.
        last: the token before the first, `[B,1,C]`; zeros by default. One token needs it.
        key_padding_mask: `[B,T]`, True = padding, which is no token.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).

    Returns:
        the mixtures `[...,n,C]`, and the last token, `[B,1,C]`, one row per sequence.

    Raises:
        ValueError: an argument of the wrong shape or type, or one token without `last`.
    """
    if mu.dim() != 2 or mu.shape[1] != x.shape[-1]:
        raise wrong("mu", mu, f"[n, {x.shape[-1]}], as wide as x")
    if x.dim() == 2 and last is None:
        raise ValueError("last is None, but must be the token before, since x is one token")
    one = x.new_ones(x.shape[-1])
    taps = torch.stack([one, one - 1], dim=-1)
    if x.dim() == 2 and last is not None:
        before, last = causal_conv_step(x, taps, last)
    else:
        before, last = causal_conv(
            x, taps, state=last, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens
        )
    return x.unsqueeze(-2) + (before - x).unsqueeze(-2) * mu, last
