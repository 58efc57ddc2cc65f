"""The key/value cache of softmax attention: prefill and step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.checks import check_key_padding_mask, check_qkv, check_step, shape
from unrolled.ops.masks import without_padding
from unrolled.ops.observing import may_read
from unrolled.ops.options import score_scale
from unrolled.ops.precision import without_autocast
from unrolled.ops.softmax.attention import softmax_attention

RECENT = 64  # tokens collected before they are joined to the past


class KVCache(NamedTuple):
    """All keys and values seen so far. No function here modifies a cache passed to it.

    New tokens are appended to the short `recent` part; when that has 64 tokens, it is appended to `past`. So
    on average a step copies 1/64 of the cache, and two continuations can share a past.
    """

    past_k: Tensor  # [B,G,P,D]
    past_v: Tensor  # [B,G,P,M]
    past_padding: Tensor  # [B,P], True = padding
    recent_k: Tensor  # [B,G,W,D]
    recent_v: Tensor  # [B,G,W,M]
    recent_padding: Tensor  # [B,W]
    position: Tensor  # [B], valid tokens seen


CACHE_GROWS = {
    name: (axis, letter)
    for part, letter in (("past", "P"), ("recent", "W"))
    for name, axis in ((f"{part}_k", 2), (f"{part}_v", 2), (f"{part}_padding", 1))
}


def empty_cache(batch_size: int, n_kv_heads: int, head_dim: int, value_dim: int, like: Tensor) -> KVCache:
    """Make an empty cache with the device and dtype of `like`."""
    k, v = (like.new_empty(batch_size, n_kv_heads, 0, width) for width in (head_dim, value_dim))
    padding = torch.empty(batch_size, 0, dtype=torch.bool, device=like.device)
    position = torch.zeros(batch_size, dtype=torch.long, device=like.device)
    return KVCache(k, v, padding, k, v, padding, position)


def softmax_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    *,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, KVCache]:
    """Causal attention of `q [B,T,H,D]` to the cache and to the keys and values of the same T tokens.

    Padded tokens (`key_padding_mask [B,T]`, True = padding) are masked and not counted in `position`.

    Returns:
        `o [B,T,H,M]`, and the cache with the new tokens.
    """
    dtype = cache.past_k.dtype

    def attend(q: Tensor, keys: Tensor, values: Tensor, **masks: Any) -> Tensor:
        with without_autocast(q.device):
            return softmax_attention(q.to(dtype), keys, values, scale=scale, **masks)

    return attend_to_cache(attend, q, k, v, cache, key_padding_mask)


def attend_to_cache(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cache: KVCache, padding: Tensor | None
) -> tuple[Tensor, KVCache]:
    """Append `k [B,T,G,D]` and `v [B,T,G,M]` to the cache and attend to it causally: `[B,T,H,M]`, the cache.

    `attend` takes q, k and v, `causal` and `key_padding_mask`; `padding [B,T]` is True at padded new tokens.
    """
    check_qkv(q, k, v)
    anything_padded = padding is not None or cached_length(cache) > 0
    cache = extend_cache(cache, k, v, padding)
    keys, values = cache.past_k.transpose(1, 2), cache.past_v.transpose(1, 2)
    mask = cache.past_padding if anything_padded else None
    if mask is not None and may_read(mask) and not mask.any():
        mask = None  # a mask would copy all keys and values
    return attend(q, keys, values, causal=True, key_padding_mask=mask).to(v.dtype), cache


def softmax_step(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, *, scale: float | None = None
) -> tuple[Tensor, KVCache]:
    """One token: append the key `[B,G,D]` and value `[B,G,M]`, then attend from the query `[B,H,D]`.

    Returns:
        `o [B,H,M]`, and the new cache.
    """
    check_step(q, k, v)
    cache = extend_cache_by_one(cache, k, v)
    (B, H, D), (_, G, M), dtype = q.shape, v.shape, cache.past_k.dtype
    with without_autocast(q.device):
        grouped = (q.to(dtype) * score_scale(scale, D)).reshape(B, G, H // G, D)
        weights = cached_scores(grouped, cache).softmax(-1)
        P = cache.past_k.shape[2]
        o = weights[..., :P] @ cache.past_v + weights[..., P:] @ cache.recent_v
    return o.reshape(B, H, M).to(v.dtype), cache


def cached_length(cache: KVCache) -> int:
    """Length of a cache, padding included."""
    return cache.past_padding.shape[1] + cache.recent_padding.shape[1]


def cached_scores(q: Tensor, cache: KVCache) -> Tensor:
    """Scores `[B,G,P,S]` of scaled queries `[B,G,P,D]` with all cached keys; -inf at padding."""
    scores = torch.cat([q @ cache.past_k.mT, q @ cache.recent_k.mT], dim=-1)
    padding = torch.cat([cache.past_padding, cache.recent_padding], dim=1)
    return scores.masked_fill(padding[:, None, None, :], -torch.inf)


def extend_cache(cache: KVCache, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> KVCache:
    """Append the recent part, then new keys `[B,T,G,D]` and values `[B,T,G,M]`, to the past."""
    _check_cache(cache, k, v)
    B, T = k.shape[:2]
    if key_padding_mask is None:
        new_padding = torch.zeros(B, T, dtype=torch.bool, device=k.device)
    else:
        check_key_padding_mask(key_padding_mask, B, T)
        new_padding = key_padding_mask
        k, v = without_padding(k, new_padding), without_padding(v, new_padding)
    dtype = cache.past_k.dtype
    keys = torch.cat([cache.past_k, cache.recent_k, k.transpose(1, 2).to(dtype)], dim=2)
    values = torch.cat([cache.past_v, cache.recent_v, v.transpose(1, 2).to(dtype)], dim=2)
    padding = torch.cat([cache.past_padding, cache.recent_padding, new_padding], dim=1)
    position = cache.position + (~new_padding).sum(1)
    return KVCache(keys, values, padding, *_nothing_recent(keys, values, padding), position)


def extend_cache_by_one(cache: KVCache, k: Tensor, v: Tensor) -> KVCache:
    """Append one key `[B,G,D]` and value `[B,G,M]` to the recent part, which joins the past at 64 tokens."""
    _check_cache(cache, k.unsqueeze(1), v.unsqueeze(1))
    dtype = cache.past_k.dtype
    recent_k = torch.cat([cache.recent_k, k.unsqueeze(2).to(dtype)], dim=2)
    recent_v = torch.cat([cache.recent_v, v.unsqueeze(2).to(dtype)], dim=2)
    recent_padding = torch.nn.functional.pad(cache.recent_padding, (0, 1))
    past_k, past_v, past_padding = cache.past_k, cache.past_v, cache.past_padding
    if recent_k.shape[2] == RECENT:
        past_k, past_v = torch.cat([past_k, recent_k], dim=2), torch.cat([past_v, recent_v], dim=2)
        past_padding = torch.cat([past_padding, recent_padding], dim=1)
        recent_k, recent_v, recent_padding = _nothing_recent(recent_k, recent_v, recent_padding)
    return KVCache(past_k, past_v, past_padding, recent_k, recent_v, recent_padding, cache.position + 1)


def _nothing_recent(k: Tensor, v: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make empty recent parts; newly allocated, as a slice would keep the whole tensor in memory."""
    (B, G, _, D), M = k.shape, v.shape[3]
    return k.new_empty(B, G, 0, D), v.new_empty(B, G, 0, M), padding.new_empty(B, 0)


def _check_cache(cache: KVCache, k: Tensor, v: Tensor) -> None:
    (B, _, G, D), M = k.shape, v.shape[3]
    for part in ("past", "recent"):
        padding = getattr(cache, f"{part}_padding")
        S = padding.shape[-1] if padding.dim() else 0
        for name, expected in (("k", [B, G, S, D]), ("v", [B, G, S, M]), ("padding", [B, S])):
            found = shape(getattr(cache, f"{part}_{name}"))
            if found != expected:
                raise ValueError(f"cache.{part}_{name} has shape {found}, but must be {expected}")
    if shape(cache.position) != [B]:
        raise ValueError(f"cache.position has shape {shape(cache.position)}, but must be [{B}]")
