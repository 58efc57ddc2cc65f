r"""Softmax attention: the one that all the others are measured against.

    o_i = sum_j a_ij v_j        a_ij = exp(q_i . k_j / sqrt(D)) / sum_j' exp(q_i . k_j' / sqrt(D))

Causal attention sums over j <= i. Run one token at a time, its state is the list of all keys and values seen.

Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, eq. 1 and section 3.2.

Cost per head: time O(T^2 (D+M)); memory O(T) where one of torch's fused kernels fits, else O(T^2), as with
M other than D or a mask other than causal; time and state O(T (D+M)) per generated token.
Cannot: generate at a constant cost. Its state grows with every token.

With `rotary`, queries and keys are rotated by their positions before they meet (RoFormer, arXiv 2104.09864,
eq. 34), and the cache holds rotated keys.
"""

from torch import Tensor

from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.contract import Supports
from unrolled.ops.softmax import (
    CACHE_GROWS,
    KVCache,
    empty_cache,
    softmax_attention,
    softmax_prefill,
    softmax_step,
)


class SoftmaxAttention(MultiHeadAttention[KVCache, None]):
    """Multi-head softmax attention; the arguments are those of `MultiHeadAttention`."""

    supports = Supports(
        causal=True,
        bidirectional=True,
        cross=True,
        padding=True,
        packing=True,
        recurrence="growing",
        attn_mask=True,
        single_queries=True,
        weights=True,
    )
    growing = CACHE_GROWS

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k = heads.rotated()
        return softmax_attention(q, k, heads.v, causal=self.causal, **masks._asdict())

    def init_state(self, batch_size: int) -> KVCache:
        """Make the cache of `batch_size` sequences that have not begun: empty."""
        like = self.out_proj.weight.new_empty(0, dtype=self.state_dtype)
        return empty_cache(batch_size, self.n_kv_heads, self.head_dim, self.value_dim, like)

    def prefill_heads(
        self, heads: Heads[None], state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend in parallel to the cache and to the new tokens."""
        q, k = heads.rotated()
        return softmax_prefill(q, k, heads.v, state, key_padding_mask=key_padding_mask)

    def step_heads(self, heads: Heads[None], state: KVCache) -> tuple[Tensor, KVCache]:
        """Attend from one token to the whole cache."""
        q, k = heads.rotated()
        return softmax_step(q, k, heads.v, state)
