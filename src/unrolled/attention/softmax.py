r"""Softmax attention: the baseline of all other mechanisms.

    o_i = sum_j a_ij v_j        a_ij = exp(q_i . k_j / sqrt(D)) / sum_j' exp(q_i . k_j' / sqrt(D))

Causal attention sums over j <= i. When it runs one token at a time, its state is the cache of all keys and
values so far.

Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, eq. 1 and section 3.2.

Cost per head: time O(T^2 (D+M)); memory O(T) where one of torch's fused kernels fits, else O(T^2), as with
M other than D or a mask other than causal; time and state O(T (D+M)) per generated token.
Cannot: generate at a constant cost. Its state grows with every token.

With `rotary`, queries and keys are rotated by their positions (RoFormer, arXiv 2104.09864, eq. 34), and the
cache holds rotated keys.
"""

from torch import Tensor

from unrolled.attention._cache import CachedAttention
from unrolled.attention._options import GENERAL
from unrolled.attention.base import Heads, Masks
from unrolled.ops.softmax import KVCache, softmax_attention, softmax_prefill, softmax_step


class SoftmaxAttention(CachedAttention):
    """Multi-head softmax attention; its options are those of `MultiHeadAttention`."""

    supports = GENERAL.but(recurrence="growing", attn_mask=True, weights=True)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k = heads.rotated()
        return softmax_attention(q, k, heads.v, causal=self.causal, **masks._asdict())

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
