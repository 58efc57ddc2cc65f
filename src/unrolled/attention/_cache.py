"""Mechanisms whose state is the keys and values of all tokens so far."""

from collections.abc import Callable

from torch import Tensor

from unrolled.attention.base import MultiHeadAttention
from unrolled.ops.checks import check_qkv
from unrolled.ops.softmax import CACHE_GROWS, KVCache, cached_length, empty_cache, extend_cache


class CachedAttention(MultiHeadAttention[KVCache, None]):
    """Multi-head attention whose state is a `KVCache`."""

    growing = CACHE_GROWS

    def init_heads(self, batch_size: int) -> KVCache:
        """Make the empty cache of `batch_size` sequences before their first token."""
        like = self.out_proj.weight.new_empty(0, dtype=self.state_dtype)
        return empty_cache(batch_size, self.n_kv_heads, self.head_dim, self.value_dim, like)


def attend_to_cache(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cache: KVCache, padding: Tensor | None
) -> tuple[Tensor, KVCache]:
    """Append `k [B,T,G,D]` and `v [B,T,G,M]` to the cache and attend to it causally: `[B,T,H,M]`, the cache.

    `attend` takes q, k and v, `causal` and `key_padding_mask`; `padding [B,T]` is True at padded new tokens.
    """
    check_qkv(q, k, v)
    any_padding = padding is not None or cached_length(cache) > 0
    cache = extend_cache(cache, k, v, padding)
    keys, values = cache.past_k.transpose(1, 2), cache.past_v.transpose(1, 2)
    mask = cache.past_padding if any_padding else None
    return attend(q, keys, values, causal=True, key_padding_mask=mask).to(v.dtype), cache
