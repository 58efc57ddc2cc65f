r"""Top-k attention: softmax attention in which each query keeps the k keys of its largest scores.

    o_i = sum_{j in T_i} a_ij v_j    a_ij = softmax over T_i of s_ij    s_ij = q_i . k_j / sqrt(D)

T_i holds the k keys with the largest s_ij among those that query i may read, or all of them where there are
no more than k. Between equal scores the choice is unspecified. The choice itself has no gradient.

Vyas, Katharopoulos and Fleuret 2020, "Fast Transformers with Clustered Attention", arXiv 2007.04825, where it
is called "oracle top", an upper bound for methods that choose k keys; Gupta, Dar, Goodman, Ciprut and Berant
2021, "Memory-efficient Transformers via Top-k Attention", arXiv 2106.06899, for computing it chunk by chunk.

Cost per head: time O(T S (D + M)), since all scores are computed; memory O((T + S) (D + M) + T k), since the
scores of only a few queries are held at a time, in training too; time and state O(S (D + M)) per generated
token.
Cannot: be faster than softmax attention, or generate at a constant cost. Where the k-th score and the next
are nearly equal, rounding decides which is kept; the more keys there are, the less that matters.
Equals softmax attention: with k >= S.

With `rotary`, queries and keys are rotated by their positions, and the cache holds rotated keys.
"""

import math
from functools import partial, reduce
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unrolled.attention._cache import CachedAttention
from unrolled.attention._options import GENERAL
from unrolled.attention.base import CommonOptions, Heads, Masks
from unrolled.ops.checks import check_attn_mask, check_qkv, check_step
from unrolled.ops.masks import zero_padding
from unrolled.ops.node import like_attention, one_node
from unrolled.ops.observing import transforming
from unrolled.ops.options import check_integers
from unrolled.ops.packing import segment_ids
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.replay import chosen
from unrolled.ops.softmax import (
    KVCache,
    attend_to_cache,
    cached_scores,
    extend_cache_by_one,
    softmax_attention,
    softmax_or_zero,
)

SCORES = 2**21  # held in memory at a time, over all rows and heads; more are not faster on a CPU


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

    The arguments and errors are those of `softmax_attention`. A floating-point `attn_mask` is added to the
    scores before the largest are chosen.
    """
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    (B, T, H, D), (S, G) = q.shape, k.shape[1:3]
    if n_keys >= S:
        masks = Masks(key_padding_mask, attn_mask, cu_seqlens)
        return softmax_attention(q, k, v, causal=causal, **masks._asdict())
    dtype, out_dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype), v.dtype
    k, v = zero_padding(key_padding_mask, k, v)
    if attn_mask is not None:
        check_attn_mask(attn_mask, (B, H, T, S))
        if attn_mask.dtype != torch.bool:  # the type of the scores may not hold its numbers
            dtype = torch.promote_types(dtype, attn_mask.dtype)
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(-1, -1, T, S)
        by_head = (1, 1) if attn_mask.shape[1] == 1 else (G, H // G)
        attn_mask = attn_mask.reshape(attn_mask.shape[0], *by_head, T, S)
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
            queries, keys = q[..., begin:end, :], k[..., :seen, :]
            chunk = Chunk(queries, keys, mask, begin, last, segments, key_padding_mask)
            kept = chosen(partial(_best, n_keys, chunk), S)
            # The backward pass computes the scores and their mask again, so that they need not be stored.
            values = v[..., :seen, :]
            if transforming():  # transforms of `torch.func` refuse checkpoints
                outs.append(_read(kept, values, chunk))
                continue
            outs.append(checkpoint(_read, kept, values, chunk, use_reentrant=False, preserve_rng_state=False))
        o = torch.cat(outs, -2)
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out_dtype)


class Chunk(NamedTuple):
    """The queries from `begin` on, and which of the first S keys each of them may read."""

    q: Tensor  # [B,G,P,C,D]
    k: Tensor  # [B,G,1,S,D]
    mask: Tensor | None  # broadcastable to [B,G,P,C,S]; added to the scores if floating point
    begin: int
    last: Tensor | None  # [T], the last key that each query may read
    segments: Tensor | None  # [T], the packed sequence of each token
    key_padding_mask: Tensor | None

    def hidden(self) -> Tensor | None:
        """Return which keys each query may not read, broadcastable to `[B,G,P,C,S]`; None for none."""
        begin, end, S = self.begin, self.begin + self.q.shape[-2], self.k.shape[-2]
        found = []
        if self.last is not None:
            found.append(torch.arange(S, device=self.q.device) > self.last[begin:end].unsqueeze(1))
        if self.segments is not None:
            found.append(self.segments[begin:end].unsqueeze(1) != self.segments[:S])
        if self.key_padding_mask is not None:
            found.append(self.key_padding_mask[:, None, None, None, :S])
        return reduce(torch.logical_or, found) if found else None

    def scores(self) -> Tensor:
        """Return the scores `[B,G,P,C,S]`, minus infinity where a query may not read a key."""
        scores, mask = self.q @ self.k.mT, self.mask
        if mask is not None:
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = (scores + mask).masked_fill(mask == -torch.inf, -torch.inf)
        hidden = self.hidden()
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


@torch.no_grad()
def _best(n_keys: int, chunk: Chunk) -> Tensor:
    """Return the indices of the keys with the largest scores, `[B,G,P,C,k]`."""
    scores = chunk.scores()
    return scores.topk(min(n_keys, scores.shape[-1]), sorted=False).indices


def _read(kept: Tensor, v: Tensor, chunk: Chunk) -> Tensor:
    """Attend to the kept keys. Multiplying by all values is faster than gathering a few of them."""
    scores = chunk.scores()
    weights = softmax_or_zero(scores.gather(-1, kept))
    return torch.zeros_like(scores).scatter(-1, kept, weights) @ v


def topk_prefill(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, n_keys: int, *, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, KVCache]:
    """Causal top-k attention of `q [B,T,H,D]` to the cache and to keys and values of the same tokens."""
    return attend_to_cache(partial(topk_attention, n_keys=n_keys), q, k, v, cache, key_padding_mask)


def topk_step(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, n_keys: int) -> tuple[Tensor, KVCache]:
    """Append one token, `k [B,G,D]` and `v [B,G,M]`, to the cache; then `q [B,H,D]` reads its best keys."""
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


class TopkAttention(CachedAttention):
    """Multi-head top-k attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        n_keys: how many keys k a query keeps.

    Raises:
        ValueError: n_keys below 1.
    """

    supports = GENERAL.but(recurrence="growing", attn_mask=True, sequence=True)

    def __init__(self, d_model: int, n_heads: int, *, n_keys: int = 32, **common: Unpack[CommonOptions]):
        super().__init__(d_model, n_heads, **common)
        check_integers(1, n_keys=n_keys)
        self.n_keys = n_keys

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k = self.rotated(heads)
        return topk_attention(q, k, heads.v, self.n_keys, causal=self.causal, **masks._asdict())

    def prefill_heads(
        self, heads: Heads[None], state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend in parallel to the cache and to the new tokens."""
        q, k = self.rotated(heads)
        return topk_prefill(q, k, heads.v, state, self.n_keys, key_padding_mask=key_padding_mask)

    def step_heads(self, heads: Heads[None], state: KVCache) -> tuple[Tensor, KVCache]:
        """Attend from one token to the best of the cache."""
        q, k = self.rotated(heads)
        return topk_step(q, k, heads.v, state, self.n_keys)
