r"""Linear attention: softmax's exp(q . k) replaced by phi(q) . phi(k), so that causal attention is an RNN.

    o_i = phi(q_i)^T S_i / phi(q_i)^T z_i
    S_i = sum_{j <= i} phi(k_j) v_j^T = S_{i-1} + phi(k_i) v_i^T
    z_i = sum_{j <= i} phi(k_j)       = z_{i-1} + phi(k_i)

Bidirectional attention sums over all j. There is no 1/sqrt(D). Run one token at a time, (S, z) is the state.

Katharopoulos, Vyas, Pappas and Fleuret 2020, "Transformers are RNNs: Fast Autoregressive Transformers with
Linear Attention", arXiv 2006.16236: eq. 4-7 (definition), 8-12 (causal), 16-20 (recurrence).

Cost per head, with R features (R = D for elu), values M wide and chunks of C = 64 tokens: in training time
O(T (R M + C (R+M))) and memory O(T (R+M)); per generated token time, memory and state O(R M).
Cannot: honour an arbitrary `attn_mask`, or attend sharply: the weights have rank at most R.
Equals softmax attention: never for a finite R. It is exact for its own kernel phi(q) . phi(k).

With `rotary` the features are rotated in the numerator only, and the denominator keeps the plain ones, as in
RoFormer (arXiv 2104.09864, eq. 19): rotated products may be negative, and a sum of them may vanish.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.attention._multihead import Heads, Masks, MultiHeadAttention
from unrolled.contract import Supports
from unrolled.ops.feature_maps import FeatureMap, make_feature_map
from unrolled.ops.kernels import linear as kernels
from unrolled.ops.linear import LinearState, check_state, linear_attention
from unrolled.ops.linear_chunked import safe_divide
from unrolled.ops.positions import rotary
from unrolled.ops.precision import accumulation_dtype


class LinearAttentionState(NamedTuple):
    """S `[B,G,R,M]`, z `[B,G,R]`, and the number of tokens seen `[B]`; its size never changes."""

    kv: Tensor
    k_sum: Tensor
    position: Tensor


def rotary_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """o_i = sum_j (R_i q_i . R_j k_j) v_j / sum_j q_i . k_j for features `q [B,T,H,R]`, `k [B,T,G,R]`.

    Both sums are taken in fp32 at least, since without a denominator the first may leave the range of fp16.

    Returns:
        `o [B,T,H,M]`, and the state: S of the rotated keys, z of the plain ones.
    """
    dtype, out_dtype = accumulation_dtype(v.dtype), v.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    counts = v.new_ones(*v.shape[:3], 1)
    num, numerator_state = linear_attention(
        rotary(q, positions),
        rotary(k, positions),
        v,
        causal=causal,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=True,
        normalize=False,
    )
    den, denominator_state = linear_attention(
        q,
        k,
        counts,
        causal=causal,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        state=None if state is None else LinearState(state.k_sum.unsqueeze(-1), state.k_sum),
        return_state=True,
        normalize=False,
    )
    return safe_divide(num, den).to(out_dtype), LinearState(numerator_state.kv, denominator_state.k_sum)


class LinearAttention(MultiHeadAttention):
    """Multi-head linear attention.

    Args:
        d_model, n_heads, causal, n_kv_heads, head_dim, value_dim, bias, rotary: see `MultiHeadAttention`.
        feature_map: "elu", "relu", "squared_relu", "polynomial", or a `FeatureMap` for this head width.
    """

    supports = Supports(
        causal=True, bidirectional=True, cross=True, padding=True, packing=True, recurrence="constant"
    )
    state_type = LinearAttentionState

    def __init__(self, d_model: int, n_heads: int, *, feature_map: str | FeatureMap = "elu", **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        if isinstance(feature_map, str):
            feature_map = make_feature_map(feature_map, self.head_dim)
        if not isinstance(feature_map, FeatureMap):
            raise ValueError(f"feature_map is {feature_map!r}, but must be a name or a FeatureMap object")
        if feature_map.head_dim != self.head_dim:
            raise ValueError(
                f"feature_map takes heads {feature_map.head_dim} wide, but they are {self.head_dim}"
            )
        if self.rotary and feature_map.feature_dim % 2:
            raise ValueError(
                f"rotary wants an even number of features, but the map gives {feature_map.feature_dim}"
            )
        self.feature_map = feature_map

    def attend(self, heads: Heads, masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k = self.feature_map.phi_q(heads.q), self.feature_map.phi_k(heads.k)
        causal, padding, cu_seqlens = self.causal, masks.key_padding_mask, masks.cu_seqlens
        if heads.positions is None:
            return linear_attention(
                q, k, heads.v, causal=causal, key_padding_mask=padding, cu_seqlens=cu_seqlens
            )
        o, _ = rotary_linear_attention(
            q, k, heads.v, heads.positions, causal=causal, key_padding_mask=padding, cu_seqlens=cu_seqlens
        )
        return o

    def init_state(self, batch_size: int) -> LinearAttentionState:
        """Make the state of `batch_size` sequences that have not begun: zeros."""
        like, R = self.out_proj.weight, self.feature_map.feature_dim
        kv = like.new_zeros(batch_size, self.n_kv_heads, R, self.value_dim, dtype=self._state_dtype)
        k_sum = like.new_zeros(batch_size, self.n_kv_heads, R, dtype=self._state_dtype)
        return LinearAttentionState(kv, k_sum, like.new_zeros(batch_size, dtype=torch.long))

    def prefill_heads(
        self, heads: Heads, state: LinearAttentionState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """Attend in parallel, from a state to a state."""
        q, k, v = self.feature_map.phi_q(heads.q), self.feature_map.phi_k(heads.k), heads.v
        before = LinearState(state.kv, state.k_sum)
        if heads.positions is None:
            o, after = linear_attention(
                q, k, v, causal=True, key_padding_mask=key_padding_mask, state=before, return_state=True
            )
        else:
            o, after = rotary_linear_attention(
                q, k, v, heads.positions, causal=True, key_padding_mask=key_padding_mask, state=before
            )
        seen = q.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(1)
        return o, LinearAttentionState(*after, state.position + seen)

    def step_heads(self, heads: Heads, state: LinearAttentionState) -> tuple[Tensor, LinearAttentionState]:
        """Run one step of the recurrence."""
        q, k, v, positions, _ = heads
        kv, k_sum, position = state
        if positions is None:
            # What `linear_attention_step` does, without the checks that the projection makes superfluous.
            sizes = (q.shape[0], self.n_kv_heads, self.feature_map.feature_dim, self.value_dim)
            check_state(state, sizes, accumulation_dtype(q.dtype))
            o, kv, k_sum = kernels.linear_attention_step(q, k, v, kv, k_sum, None, True, self.feature_map)
        else:
            q, k = self.feature_map.phi_q(q), self.feature_map.phi_k(k)
            o, (kv, k_sum) = rotary_linear_attention(
                q.unsqueeze(1),
                k.unsqueeze(1),
                v.unsqueeze(1),
                positions.unsqueeze(1),
                causal=True,
                state=LinearState(kv, k_sum),
            )
            o = o.squeeze(1)
        return o, LinearAttentionState(kv, k_sum, position + 1)
