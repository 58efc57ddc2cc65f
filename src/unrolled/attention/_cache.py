"""Mechanisms whose state is the keys and values of all tokens so far."""

import torch
from torch import Tensor

from unrolled.attention.base import Heads, MultiHeadAttention
from unrolled.ops.masks import zero_padding
from unrolled.ops.sequence import Appended, Fields, Ranks, scan
from unrolled.ops.softmax import CACHE_GROWS, KVCache, empty_cache, extend_cache


class CachedAttention(MultiHeadAttention[KVCache, None]):
    """Multi-head attention whose state is a `KVCache`."""

    growing = CACHE_GROWS

    def init_heads(self, batch_size: int) -> KVCache:
        """Make the empty cache of `batch_size` sequences before their first token."""
        like = self.out_weight.new_empty(0, dtype=self.state_dtype)
        return empty_cache(batch_size, self.n_kv_heads, self.head_dim, self.value_dim, like)

    def attend_at_end(
        self, heads: Heads[None], state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend to a long cache and to new tokens, as `prefill_heads` does."""
        return self.prefill_heads(heads, state, key_padding_mask)

    def attend_over(
        self,
        ranks: Ranks,
        heads: Heads[None],
        state: KVCache,
        key_padding_mask: Tensor | None,
        *,
        to_end: bool = True,
    ) -> tuple[Tensor, KVCache]:
        """Attend to a cache, and to the keys and values of earlier ranks and of this rank."""
        (_, k), v = self.rotated(heads), heads.v
        start = extend_cache(state, k[:, :0], v[:, :0])  # the recent part joins the past
        k, v = zero_padding(key_padding_mask, k, v)
        own = {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        given = {"k": start.past_k, "v": start.past_v}
        if key_padding_mask is not None:
            own["padding"], given["padding"] = key_padding_mask, start.past_padding
        before, after = scan(ranks, given, Appended(own), to_end=to_end)
        earlier, total = ranks.counts(k, key_padding_mask)
        o, end = self.attend_at_end(heads, _appended(start, before, earlier), key_padding_mask)
        return o, _appended(start, after, total) if to_end else end


def _appended(start: KVCache, fields: Fields, tokens: int | Tensor) -> KVCache:
    """Return a cache with the keys and values in `fields`, which begin with those of `start`."""
    k, v, padding = fields["k"], fields["v"], fields.get("padding")
    if padding is None:
        new = k.shape[2] - start.past_k.shape[2]
        padding = torch.nn.functional.pad(start.past_padding, (0, new))
    position = start.position + tokens
    return start._replace(past_k=k, past_v=v, past_padding=padding, position=position)
