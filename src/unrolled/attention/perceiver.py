r"""Perceiver attention: a few latents read all the inputs, and the queries read the latents.

    z_n = sum_j softmax_j(l_n . k_j / sqrt(D)) v_j        each of N learned latents l_n reads the inputs
    m_n = l_n + W z_n                                     what it has learned and what it has read
    o_i = sum_n softmax_n(q_i . m_n / sqrt(D)) z_n        each query reads the latents

l_n, z_n and m_n exist for each head, and W mixes the heads of what one latent has read. So o = A B v, where
the rows of A [T,N] and B [N,S] sum to 1: the matrix of attention has at most the rank N.

This is Perceiver IO cut down to one layer: the inputs are their own output queries, the latents' residual
stream gives the keys of the second read, and there is nothing between the two reads. The whole architecture,
with a stack between them, is `unrolled.models.PerceiverIO`.

Jaegle et al. 2021, "Perceiver", arXiv 2103.03206, section 3.1 (the first read); "Perceiver IO", arXiv
2107.14795, section 3.1 (the second).

Cost per head: time O((T + S) N (D+M)), memory O(T + S + N) where one of torch's fused kernels fits.
Cannot: be causal, since each latent reads the whole input (use the model `PerceiverAR`, or linear attention);
honour an `attn_mask` or rotary positions, since no query meets a key.
Equals softmax attention: what the latents read does, with the queries for latents; `latent_read(q, k, v)`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.checks import check_cu_seqlens, check_qkv, shape
from unrolled.ops.dense import Linear, linear
from unrolled.ops.options import check_integers
from unrolled.ops.packing import pad_packed
from unrolled.ops.softmax import softmax_attention


def latent_read(latents: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
    """Let latents `[N,H,D]`, or for each row `[B,N,H,D]`, read `k [B,S,G,D]` and `v [B,S,G,M]`: `[B,N,H,M]`.

    Padding (`key_padding_mask [B,S]`, True = padding) is not read. A latent with nothing to read gives 0.
    """
    latents = latents.expand(k.shape[0], *latents.shape[-3:])
    return softmax_attention(latents, k, v, key_padding_mask=key_padding_mask)


def perceiver_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    latents: Tensor,
    weight: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Perceiver attention in time linear in the lengths (equations above).

    Args:
        q: queries `[B,T,H,D]`.
        k: keys `[B,S,G,D]`; H is a multiple of G, and head h of the latents reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        latents: `[N,H,D]`, or `[B,N,H,D]` given for each row.
        weight: the matrix W `[H D, H M]`.
        key_padding_mask: `[B,S]`, True = padding.

    Returns:
        `o [B,T,H,M]`; 0, with zero gradient, in a row that has nothing to read.

    Raises:
        ValueError: an argument of another shape or type.
    """
    check_qkv(q, k, v)
    (B, _, H, D), M = q.shape, v.shape[-1]
    if latents.dim() not in (3, 4) or latents.shape[-2:] != (H, D) or latents.shape[:-3] not in ((), (B,)):
        raise ValueError(f"latents has shape {shape(latents)}, but q {shape(q)} wants [N, {H}, {D}]")
    if weight.shape != (H * D, H * M):
        raise ValueError(f"weight has shape {shape(weight)}, but must be [H D, H M] = [{H * D}, {H * M}]")
    z = latent_read(latents, k, v, key_padding_mask=key_padding_mask)
    memory = latents + linear(z.flatten(-2), weight).view(*z.shape[:-1], D)
    # Latents that had nothing to read are nothing to read either.
    nothing = torch.full((B, 1), True, device=k.device) if k.shape[1] == 0 else None
    if key_padding_mask is not None and nothing is None:
        nothing = key_padding_mask.all(1, keepdim=True)
    unread = None if nothing is None else nothing.expand(B, z.shape[1])
    return softmax_attention(q, memory, z, key_padding_mask=unread)


def perceiver_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    latents: Tensor,
    weight: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Compute what `perceiver_attention` does by its definition, with both softmaxes written out."""
    H, D = q.shape[-2:]
    k, v = (x.repeat_interleave(H // k.shape[2], dim=2) for x in (k, v))
    latents = latents.expand(k.shape[0], *latents.shape[-3:])
    scores = torch.einsum("bnhd,bshd->bhns", latents, k) / D**0.5
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    z = torch.einsum("bhns,bshm->bnhm", scores.softmax(-1), v)
    memory = latents + (z.flatten(-2) @ weight.mT).view(*z.shape[:-1], D)
    scores = torch.einsum("bthd,bnhd->bhtn", q, memory) / D**0.5
    return torch.einsum("bhtn,bnhm->bthm", scores.softmax(-1), z)


class PerceiverAttention(MultiHeadAttention[None, None]):
    """Multi-head perceiver attention; the other arguments are those of `MultiHeadAttention`.

    Args:
        d_model: width of the inputs and of the output.
        n_heads: number of query heads H.
        n_latents: number N of latents.
        causal: must be False.
        shared: the other arguments of `MultiHeadAttention`, without `rotary`.

    Raises:
        ValueError: sizes that do not fit.
        UnsupportedError: it is to be causal, or to rotate positions.
    """

    supports = Supports(
        causal=False, bidirectional=True, cross=True, padding=True, packing=True, recurrence="none"
    )

    def __init__(
        self, d_model: int, n_heads: int, *, n_latents: int = 64, causal: bool = False, **shared: Any
    ):
        if causal:
            raise UnsupportedError(
                "perceiver attention is not causal, as each latent reads the whole input; use the model "
                "PerceiverAR, or linear attention"
            )
        super().__init__(d_model, n_heads, causal=causal, **shared)
        if self.rotary:
            raise UnsupportedError("latents have no position to rotate to; use other positions than rotary")
        check_integers(1, n_latents=n_latents)
        # Of the size that queries have: latents that start alike would read alike for long.
        self.latents = nn.Parameter(torch.randn(n_latents, n_heads, self.head_dim))
        self.memory_proj = Linear(n_heads * self.value_dim, n_heads * self.head_dim, bias=False)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel; packed sequences are laid side by side for it."""
        q, k, v, *_ = heads
        if masks.cu_seqlens is None:
            return self._attend(q, k, v, masks.key_padding_mask)
        if masks.key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask was given with cu_seqlens, but packed sequences have no padding"
            )
        check_cu_seqlens(masks.cu_seqlens, q, k)
        (q, padding), (k, _), (v, _) = (pad_packed(x, masks.cu_seqlens) for x in (q, k, v))
        return self._attend(q, k, v, padding)[~padding].unsqueeze(0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        latents, weight = self.latents, self.memory_proj.weight
        return perceiver_attention(q, k, v, latents, weight, key_padding_mask=key_padding_mask)
