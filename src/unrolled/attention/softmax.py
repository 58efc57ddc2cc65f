r"""Softmax attention: the baseline of all other mechanisms.

    o_i = sum_j a_ij v_j        a_ij = exp(q_i . k_j / sqrt(D)) / sum_j' exp(q_i . k_j' / sqrt(D))

Causal attention sums over j <= i. When it runs one token at a time, its state is the cache of all keys and
values so far.

Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, eq. 1 and section 3.2.

Cost per head: time O(T^2 (D+M)); memory O(T) in the C++ kernels of a CPU and where one of torch's fused
kernels fits, else O(T^2), as with an `attn_mask`; time and state O(T (D+M)) per generated token.
Cannot: generate at a constant cost. Its state grows with every token.

With `rotary`, queries and keys are rotated by their positions (RoFormer, arXiv 2104.09864, eq. 34), and the
cache holds rotated keys. Two options of later models, `qk_norm` and `output_gate`, are off by default:

    q <- w_q * q / sqrt(mean(q^2) + eps), and k likewise (before the rotation)
    y = W_o (o * sigmoid(W_g x))

The norm keeps the scores from growing in training (Dehghani et al. 2023, arXiv 2302.05442, section 2.1). The
gate lets a head return nothing where softmax must spread a weight of 1 (Qiu et al. 2025, arXiv 2505.06708,
section 2.2).
"""

from typing import Literal, Unpack, cast

from torch import Tensor, nn

from unrolled.attention._cache import CachedAttention
from unrolled.attention._options import GENERAL
from unrolled.attention.base import CommonOptions, Heads, Masks, Projected
from unrolled.ops.dense import Linear
from unrolled.ops.options import check_above_zero
from unrolled.ops.softmax import KVCache, extend_cache, softmax_attention, softmax_prefill, softmax_step
from unrolled.ops.window import window_attention


class SoftmaxAttention(CachedAttention):
    """Multi-head softmax attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        qk_norm: normalise queries and keys by their root mean square: "head", each head with weights that all
            heads share (Qwen3, Gemma 3), or "all", all heads together (OLMo 2); None for no norm.
        eps: added to the mean square in these norms.
        output_gate: multiply the heads' outputs by gates in (0, 1), computed from the queries' input.

    Raises:
        ValueError: an unknown qk_norm, or eps not above 0.
    """

    supports = GENERAL.but(recurrence="growing", attn_mask=True, sequence=True, weights=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        qk_norm: Literal["head", "all"] | None = None,
        eps: float = 1e-6,
        output_gate: bool = False,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_above_zero(eps=eps)
        if qk_norm not in ("head", "all", None):
            raise ValueError(f"qk_norm is {qk_norm!r}, but must be 'head', 'all' or None")
        self.qk_norm = qk_norm
        if qk_norm is not None:
            q_width, k_width = self.widths[:2] if qk_norm == "all" else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = nn.RMSNorm(q_width, eps), nn.RMSNorm(k_width, eps)
        self.gate_proj: Linear | None = None
        if output_gate:
            self.supports = self.supports.but(weights=False)
            bias = self.qkv_proj.bias is not None
            self.gate_proj = Linear(d_model, n_heads * self.value_dim, bias=bias)

    def project(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Projected:
        """Project to queries and keys, normalised if configured, and to values."""
        q, k, v = super().project(query, key, value)
        if self.qk_norm is None:
            return q, k, v
        return self._normed(q, self.q_norm), self._normed(k, self.k_norm), v

    def _normed(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        wide = x.to(norm.weight.dtype)  # under autocast projections are narrower than weights
        if self.qk_norm == "head":
            return cast(Tensor, norm(wide)).to(x.dtype)
        return cast(Tensor, norm(wide.flatten(-2))).view_as(x).to(x.dtype)

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Gate the heads' outputs if configured, and project back."""
        if self.gate_proj is not None:
            o = o * self.gate_proj(x).sigmoid().unflatten(-1, o.shape[-2:])
        return super().merge_heads(o, x)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k = self.rotated(heads)
        return softmax_attention(q, k, heads.v, causal=self.causal, **masks._asdict())

    def prefill_heads(
        self, heads: Heads[None], state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend in parallel to the cache and to the new tokens."""
        q, k = self.rotated(heads)
        return softmax_prefill(q, k, heads.v, state, key_padding_mask=key_padding_mask)

    def attend_at_end(
        self, heads: Heads[None], state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend as `prefill_heads` does, but block by block: no mask of all queries and keys is made."""
        (q, k), v = self.rotated(heads), heads.v
        cache = extend_cache(state, k, v, key_padding_mask)
        keys, values = (x.transpose(1, 2).to(v.dtype) for x in (cache.past_k, cache.past_v))
        padding = cache.past_padding
        return window_attention(q, keys, values, window_size=(-1, 0), key_padding_mask=padding), cache

    def step_heads(self, heads: Heads[None], state: KVCache) -> tuple[Tensor, KVCache]:
        """Attend from one token to the whole cache."""
        q, k = self.rotated(heads)
        return softmax_step(q, k, heads.v, state)
