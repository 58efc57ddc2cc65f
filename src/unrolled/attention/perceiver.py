r"""Perceiver attention: a few latents read all inputs, and the queries read the latents.

    z_n = sum_j softmax_j(l_n . k_j / sqrt(D)) v_j        each of N learned latents l_n reads the inputs
    m_n = l_n + W z_n                                     its keys: what it learned and what it read
    o_i = sum_n softmax_n(q_i . m_n / sqrt(D)) z_n        each query reads the latents

Each head has its own l_n, z_n and m_n; W mixes the heads of z_n. So o = A B v, where the rows of A [T,N] and
B [N,S] sum to 1: the attention matrix has rank at most N.

This is Perceiver IO reduced to one layer: the inputs are their own output queries, the latents' residual
stream gives the keys of the second read, and no layers lie between the two reads. The whole architecture is
`unrolled.models.PerceiverIO`.

Jaegle et al. 2021, "Perceiver", arXiv 2103.03206, section 3.1 (the first read); "Perceiver IO", arXiv
2107.14795, section 3.1 (the second).

Cost per head: time O((T + S) N (D+M)), memory O(T + S + N) where one of torch's fused kernels fits.
Cannot: be causal, since each latent reads the whole input (use the model `PerceiverAR`, or linear attention);
honour an `attn_mask` or rotary positions, since queries are not compared with keys.
Equals softmax attention: never. The first read by itself, `latent_read(q, k, v)`, is softmax attention.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._options import BIDIRECTIONAL_ONLY
from unrolled.attention._packed import attend_packed
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.ops.checks import check_qkv, shape
from unrolled.ops.dense import Linear, linear
from unrolled.ops.options import check_integers
from unrolled.ops.softmax import softmax_attention


def latent_read(latents: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
    """Let latents `[N,H,D]`, or for each row `[B,N,H,D]`, read `k [B,S,G,D]` and `v [B,S,G,M]`: `[B,N,H,M]`.

    Padding (`key_padding_mask [B,S]`, True = padding) is not read. A latent with nothing to read gives 0.
    """
    latents = latents.expand(k.shape[0], *latents.shape[-3:])
    return softmax_attention(latents, k, v, key_padding_mask=key_padding_mask)


def perceiver_attention(
    q: Tensor, k: Tensor, v: Tensor, latents: Tensor, weight: Tensor, key_padding_mask: Tensor | None = None
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
        `o [B,T,H,M]`; 0, with zero gradient, in a row that has nothing to attend to.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v)
    (B, _, H, D), M = q.shape, v.shape[-1]
    if latents.dim() not in (3, 4) or latents.shape[-2:] != (H, D) or latents.shape[:-3] not in ((), (B,)):
        raise ValueError(f"latents has shape {shape(latents)}, but must be [N, {H}, {D}] for q {shape(q)}")
    if weight.shape != (H * D, H * M):
        raise ValueError(f"weight has shape {shape(weight)}, but must be [H D, H M] = [{H * D}, {H * M}]")
    return _attend(q, k, v, latents, partial(linear, weight=weight), key_padding_mask)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    latents: Tensor,
    project: Callable[[Tensor], Tensor],
    key_padding_mask: Tensor | None,
) -> Tensor:
    """Compute `perceiver_attention`, with W as a function."""
    B, D = k.shape[0], q.shape[-1]
    z = latent_read(latents, k, v, key_padding_mask=key_padding_mask)
    memory = latents + project(z.flatten(-2)).view(*z.shape[:-1], D)
    # Latents without any input to read are masked in the second read.
    nothing = torch.full((B, 1), True, device=k.device) if k.shape[1] == 0 else None
    if key_padding_mask is not None and nothing is None:
        nothing = key_padding_mask.all(1, keepdim=True)
    unread = None if nothing is None else nothing.expand(B, z.shape[1])
    return softmax_attention(q, memory, z, key_padding_mask=unread)


def perceiver_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, latents: Tensor, weight: Tensor, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Compute `perceiver_attention` by its definition, with both softmaxes written out."""
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
    """Multi-head perceiver attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        n_latents: number N of latents.

    Raises:
        ValueError: n_latents below 1.
        UnsupportedError: causal attention.
    """

    supports = BIDIRECTIONAL_ONLY.but(packing=True)
    one_way = "each latent reads the whole input; use the model PerceiverAR, or linear attention"
    no_rotary = "latents have no position; use other positions"

    def __init__(self, d_model: int, n_heads: int, *, n_latents: int = 64, **common: Unpack[CommonOptions]):
        super().__init__(d_model, n_heads, **common)
        check_integers(1, n_latents=n_latents)
        # As large as queries: smaller latents would start alike, and stay alike for long.
        self.latents = nn.Parameter(torch.randn(n_latents, n_heads, self.head_dim))
        self.memory_proj = Linear(n_heads * self.value_dim, n_heads * self.head_dim, bias=False)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        if masks.cu_seqlens is not None:
            return attend_packed(self.attend, heads, masks.cu_seqlens)
        # `memory_proj` is called, so that its hooks run and it can be replaced, as by an adapter.
        return _attend(*heads[:3], self.latents, self.memory_proj, masks.key_padding_mask)
