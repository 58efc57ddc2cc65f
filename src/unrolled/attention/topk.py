r"""Top-k attention: softmax attention in which each query keeps the k keys of its largest scores.

    o_i = sum_{j in T_i} a_ij v_j    a_ij = softmax over T_i of s_ij    s_ij = q_i . k_j / sqrt(D)

T_i holds the k keys with the largest s_ij of those that query i may read, or all where there are no more
than k. Which of two equal scores is kept is not said. The choice itself has no gradient.

Vyas, Katharopoulos and Fleuret 2020, "Fast Transformers with Clustered Attention", arXiv 2007.04825, where it
is "oracle top", the best that a choice of k keys can do; Gupta, Dar, Goodman, Ciprut and Berant 2021,
"Memory-efficient Transformers via Top-k Attention", arXiv 2106.06899, for running it chunk by chunk.

Cost per head: time O(T S (D + M)), all scores are computed; memory O((T + S) (D + M) + T k), the scores of a
few queries at a time, in training too; time and state O(S (D + M)) per generated token.
Cannot: be faster than softmax attention, or generate at a constant cost. Where the k-th score and the next
are nearly equal, rounding decides which is kept; the more keys there are, the less that matters.
Equals softmax attention: with k >= S.

With `rotary`, queries and keys are rotated by their positions before they meet, and the cache holds rotated
keys.
"""

import math
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.contract import Supports
from unrolled.ops.checks import (
    check_attn_mask,
    check_cu_seqlens,
    check_key_padding_mask,
    check_qkv,
    check_step,
)
from unrolled.ops.masks import without_padding
from unrolled.ops.node import like_attention, one_node
from unrolled.ops.options import check_integers
from unrolled.ops.packing import segment_ids
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.replay import chosen
from unrolled.ops.softmax import (
    CACHE_GROWS,
    KVCache,
    cached_length,
    cached_scores,
    empty_cache,
    extend_cache,
    extend_cache_by_one,
    softmax_attention,
    softmax_or_zero,
)

SCORES = 2**21  # that are in memory at a time, of all rows and heads; more of them are not faster on a CPU


def topk_reference(q: Tensor, k: Tensor, v: Tensor, n_keys: int) -> Tensor:
    """One head, query by query: `q [T,D]`, `k [S,D]`, `v [S,M]` to `[T,M]`."""
    rows = []
    for query in q:
        scores = k @ query / math.sqrt(q.shape[-1])
        kept = scores.topk(min(n_keys, len(k))).indices
        rows.append(scores[kept].softmax(-1) @ v[kept])
    return torch.stack(rows)


@one_node(like_attention)
def topk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n_keys: int,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Attend from `q [B,T,H,D]` to the `n_keys` best of `k [B,S,G,D]` and `v [B,S,G,M]`: `[B,T,H,M]`.

    The arguments are those of `softmax_attention`; so are the errors. Numbers that `attn_mask` adds to the
    scores have a say in which are the largest.
    """
    check_qkv(q, k, v)
    (B, T, H, D), (S, G) = q.shape, k.shape[1:3]
    if n_keys >= S:
        return softmax_attention(
            q,
            k,
            v,
            causal=causal,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            cu_seqlens=cu_seqlens,
        )
    dtype, out_dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype), v.dtype
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, B, S)
        k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
    if attn_mask is not None:
        check_attn_mask(attn_mask, (B, H, T, S))
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(-1, -1, T, S)
        by_head = (1, 1) if attn_mask.shape[1] == 1 else (G, H // G)
        attn_mask = attn_mask.reshape(attn_mask.shape[0], *by_head, T, S)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, k)
    with without_autocast(q.device):
        # [B,G,P,T,D]: P = H/G query heads read one key head.
        q = q.to(dtype).reshape(B, T, G, H // G, D).permute(0, 2, 3, 1, 4) * D**-0.5
        k, v = (x.to(dtype).transpose(1, 2).unsqueeze(2) for x in (k, v))
        last = torch.arange(S - T, S, device=q.device) if causal else None
        segments = None if cu_seqlens is None else segment_ids(cu_seqlens, T)
        rows = max(1, SCORES // max(1, B * H * S))
        outs = [q.new_zeros(*q.shape[:3], 0, v.shape[-1])]
        for begin in range(0, T, rows):
            end = min(begin + rows, T)
            seen = max(0, end + S - T) if causal else S
            mask = None if attn_mask is None else attn_mask[..., begin:end, :seen]
            given = (q[..., begin:end, :], k[..., :seen, :], mask, begin, last, segments, key_padding_mask)
            kept = chosen(partial(_best, n_keys, *given), S)
            # For the gradient, the scores and what is hidden are computed again rather than kept.
            o = checkpoint(
                _read, kept, v[..., :seen, :], *given, use_reentrant=False, preserve_rng_state=False
            )
            outs.append(o)
        o = torch.cat(outs, -2)
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out_dtype)


def _hidden(
    begin: int,
    end: int,
    seen: int,
    last: Tensor | None,
    segments: Tensor | None,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """Which of the first `seen` keys queries `begin..end` may not read, broadcastable to `[B,G,P,C,seen]`.

    Query i reads keys up to `last [T]`, and those of its own sequence by `segments [T]`.
    """
    found = []
    if last is not None:
        found.append(torch.arange(seen, device=last.device) > last[begin:end].unsqueeze(1))
    if segments is not None:
        found.append(segments[begin:end].unsqueeze(1) != segments[:seen])
    if key_padding_mask is not None:
        found.append(key_padding_mask[:, None, None, None, :seen])
    return reduce(torch.logical_or, found) if found else None


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, begin: int, *hiding: Tensor | None) -> Tensor:
    """`[B,G,P,C,S]`, minus infinity for what queries from `begin` on may not read; see `_hidden`."""
    scores = q @ k.mT
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = (scores + mask).masked_fill(mask == -torch.inf, -torch.inf)
    hidden = _hidden(begin, begin + q.shape[-2], k.shape[-2], *hiding)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


@torch.no_grad()
def _best(n_keys: int, *given: Any) -> Tensor:
    """Numbers of the keys with the largest scores, `[B,G,P,C,k]`."""
    scores = _scores(*given)
    return scores.topk(min(n_keys, scores.shape[-1]), sorted=False).indices


def _read(kept: Tensor, v: Tensor, *given: Any) -> Tensor:
    """Read the kept keys of each query; products with all of them are faster than gathering a few."""
    scores = _scores(*given)
    weights = softmax_or_zero(scores.gather(-1, kept))
    return torch.zeros_like(scores).scatter(-1, kept, weights) @ v


def topk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    n_keys: int,
    *,
    key_padding_mask: Tensor | None = None,
) -> tuple[Tensor, KVCache]:
    """Causal top-k attention of `q [B,T,H,D]` to the cache and to keys and values of the same tokens."""
    check_qkv(q, k, v)
    anything_padded = key_padding_mask is not None or cached_length(cache) > 0
    cache = extend_cache(cache, k, v, key_padding_mask)
    keys, values = cache.past_k.transpose(1, 2), cache.past_v.transpose(1, 2)
    padding = cache.past_padding if anything_padded else None
    o = topk_attention(q, keys, values, n_keys, causal=True, key_padding_mask=padding)
    return o.to(v.dtype), cache


def topk_step(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, n_keys: int) -> tuple[Tensor, KVCache]:
    """One token: `k [B,G,D]` and `v [B,G,M]` join the cache, then `q [B,H,D]` reads the best of it."""
    check_step(q, k, v)
    cache = extend_cache_by_one(cache, k, v)
    (B, H, D), (G, M), dtype = q.shape, v.shape[1:], cache.past_k.dtype
    with without_autocast(q.device):
        scores = cached_scores((q.to(dtype) * D**-0.5).reshape(B, G, H // G, D), cache)
        kept = scores.detach().topk(min(n_keys, scores.shape[-1]), sorted=False).indices
        weights = torch.zeros_like(scores).scatter(-1, kept, softmax_or_zero(scores.gather(-1, kept)))
        P = cache.past_k.shape[2]
        o = weights[..., :P] @ cache.past_v + weights[..., P:] @ cache.recent_v
    return o.reshape(B, H, M).to(v.dtype), cache


class TopkAttention(MultiHeadAttention[KVCache, None]):
    """Multi-head top-k attention.

    Args:
        d_model, n_heads, causal, n_kv_heads, head_dim, value_dim, bias, rotary: see `MultiHeadAttention`.
        n_keys: how many keys k a query keeps.

    Raises:
        ValueError: n_keys below 1.
    """

    supports = Supports(
        causal=True,
        bidirectional=True,
        cross=True,
        padding=True,
        packing=True,
        recurrence="growing",
        attn_mask=True,
        single_queries=True,
    )
    growing = CACHE_GROWS

    def __init__(self, d_model: int, n_heads: int, *, n_keys: int = 32, **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        check_integers(1, n_keys=n_keys)
        self.n_keys = n_keys

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k = heads.rotated()
        return topk_attention(q, k, heads.v, self.n_keys, causal=self.causal, **masks._asdict())

    def init_state(self, batch_size: int) -> KVCache:
        """Make the cache of `batch_size` sequences that have not begun: empty."""
        like = self.out_proj.weight.new_empty(0, dtype=self.state_dtype)
        return empty_cache(batch_size, self.n_kv_heads, self.head_dim, self.value_dim, like)

    def prefill_heads(
        self, heads: Heads[None], state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend in parallel to the cache and to the new tokens."""
        q, k = heads.rotated()
        return topk_prefill(q, k, heads.v, state, self.n_keys, key_padding_mask=key_padding_mask)

    def step_heads(self, heads: Heads[None], state: KVCache) -> tuple[Tensor, KVCache]:
        """Attend from one token to the best of the cache."""
        q, k = heads.rotated()
        return topk_step(q, k, heads.v, state, self.n_keys)
