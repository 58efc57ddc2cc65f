"""Mixtures of each token with the one before it, as in RWKV.

    x_t^z = x_t + mu_z * (x_{t-1} - x_t)

Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048, section 3.1 ("token
shift"); mu is 1 - mu there.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unrolled.ops import sequence
from unrolled.ops.checks import check_state_tensor, check_tensor, wrong
from unrolled.ops.mixtures import mixtures
from unrolled.ops.node import any_length
from unrolled.ops.precision import accumulation_dtype


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
) -> tuple[Sequence[Tensor], Tensor]:
    """Mix `x [B,T,C]`, or one token `[B,C]`.

    Args:
        x: 0 at padding.
        mu: `[n,C]`, of n mixtures.
        last: the token before the first, `[B,1,C]`; zeros by default. One token needs it.
        key_padding_mask: `[B,T]`, True = padding, which is no token.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).

    Returns:
        the n mixtures, like `x`, and the last token, `[B,1,C]`, one row per sequence. Under autocast, the
        mixtures may have its type, to which linear layers would convert them.

    Raises:
        ValueError: an argument of the wrong shape or type, or one token without `last`.
    """
    check_tensor("x", x)
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise wrong("x", x, "floating point [B, T, C] or [B, C]")
    if mu.dim() != 2 or mu.shape[1] != x.shape[-1]:
        raise wrong("mu", mu, f"[n, {x.shape[-1]}], as wide as x")
    if x.dim() == 2 and last is None:
        raise ValueError("last is None, but must be the token before, since x is one token")
    before, last = _token_before(x, last, key_padding_mask, cu_seqlens)
    return mixtures(x, before, mu), last


def _token_before(
    x: Tensor, last: Tensor | None, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the token before each, and the last one."""
    apart = key_padding_mask is not None or cu_seqlens is not None or sequence.current() is not None
    if x.dim() == 3 and (apart or x.shape[1] == 0):  # a convolution with the taps 1 and 0
        one = x.new_ones(x.shape[-1])
        taps = torch.stack([one, one - 1], dim=-1)
        return sequence.causal_conv(
            x, taps, state=last, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens
        )
    sizes, dtype = (x.shape[0], 1, x.shape[-1]), accumulation_dtype(x.dtype)
    if last is None:
        last = x.new_zeros(sizes, dtype=dtype)
    check_state_tensor("last", last, sizes, dtype, x)
    if x.dim() == 2:
        return last.squeeze(1).to(x.dtype), x.unsqueeze(1).to(dtype)
    if any_length(x):  # a slice of T - 1 tokens would forbid T = 2
        before = torch.cat([last.to(x.dtype), x], 1)[:, :-1]
    else:
        before = torch.cat([last.to(x.dtype), x[:, :-1]], 1)
    return before, x[:, -1:].to(dtype, copy=True)
