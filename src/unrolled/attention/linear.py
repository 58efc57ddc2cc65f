r"""Linear attention: softmax's exp(q . k) replaced by phi(q) . phi(k), so that causal attention is an RNN.

    o_i = phi(q_i)^T S_i / phi(q_i)^T z_i
    S_i = sum_{j <= i} phi(k_j) v_j^T = S_{i-1} + phi(k_i) v_i^T
    z_i = sum_{j <= i} phi(k_j)       = z_{i-1} + phi(k_i)

Bidirectional attention sums over all j. There is no 1/sqrt(D). Run one token at a time, (S, z) is the state.

Katharopoulos, Vyas, Pappas and Fleuret 2020, "Transformers are RNNs: Fast Autoregressive Transformers with
Linear Attention", arXiv 2006.16236: eq. 4-7 (definition), 8-12 (causal), 16-20 (recurrence).

Cost per head, with R features (R = D for elu), values M wide and chunks of C = 64 tokens: in training time
O(T (R M + C (R+M))) and memory O(T (R+M)); per generated token time, memory and state O(R M).
Cannot: honour an arbitrary `attn_mask`, or attend sharply: the weights have rank at most R. With the
cosFormer map, which reads positions: attend to another sequence, or run beyond its `max_length`.
Equals softmax attention: never for a finite R. It is exact for its own kernel phi(q) . phi(k).

With `rotary` the features are rotated in the numerator only, and the denominator keeps the plain ones, as in
RoFormer (arXiv 2104.09864, eq. 19): rotated products may be negative, and a sum of them may vanish.

With `normalizer="rms"` there is no denominator: the numerator of each head is divided by its own root mean
square, and scaled by learned weights. A small denominator makes gradients large, without a bound (Qin et al.
2022, "The Devil in Linear Transformer", arXiv 2210.10340).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.contract import Supports
from unrolled.ops.feature_maps import FeatureMap, make_feature_map
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.linear import LinearState, check_state, linear_attention
from unrolled.ops.linear import operator as kernels
from unrolled.ops.linear.chunked import safe_divide
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


class LinearAttention(MultiHeadAttention[LinearAttentionState, None]):
    """Multi-head linear attention.

    Args:
        d_model, n_heads, causal, n_kv_heads, head_dim, value_dim, bias, rotary: see `MultiHeadAttention`.
        feature_map: a name in `unrolled.ops.feature_maps.FEATURE_MAPS`, or a `FeatureMap` for this head
            width; a `QueryKeyMap` maps queries and keys differently.
        feature_map_options: further arguments of the map of that name, such as `{"max_length": 4096}`.
        normalizer: what the numerator is divided by: "sum", the denominator, or "rms", its root mean square.
    """

    supports = Supports(
        causal=True,
        bidirectional=True,
        cross=True,
        padding=True,
        packing=True,
        recurrence="constant",
        single_queries=True,
        weights=True,
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        feature_map: str | FeatureMap = "elu",
        feature_map_options: Mapping[str, Any] | None = None,
        normalizer: Literal["sum", "rms"] = "sum",
        **shared: Any,
    ):
        super().__init__(d_model, n_heads, **shared)
        if normalizer not in ("sum", "rms"):
            raise ValueError(f"normalizer is {normalizer!r}, but must be 'sum' or 'rms'")
        if isinstance(feature_map, str):
            sizes = (self.head_dim, self.n_heads, self.n_kv_heads)
            feature_map = make_feature_map(feature_map, *sizes, **(feature_map_options or {}))
        elif feature_map_options is not None:
            raise ValueError("feature_map_options are for a feature_map given by name, not for an object")
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
        self.normalize = normalizer == "sum"
        if not self.normalize:
            self.supports = self.supports.but(weights=False)
            self.head_norm = HeadRMSNorm(n_heads, self.value_dim)
        if feature_map.positional:  # there is no distance between tokens of two sequences
            self.supports = self.supports.but(positions=True, cross=False, single_queries=False)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        padding, cu_seqlens = masks.key_padding_mask, masks.cu_seqlens
        o, _ = self._attend(heads, None, causal=self.causal, key_padding_mask=padding, cu_seqlens=cu_seqlens)
        return o

    def init_state(self, batch_size: int) -> LinearAttentionState:
        """Make the state of `batch_size` sequences that have not begun: zeros."""
        like, R = self.out_proj.weight, self.feature_map.feature_dim
        kv = like.new_zeros(batch_size, self.n_kv_heads, R, self.value_dim, dtype=self.state_dtype)
        k_sum = like.new_zeros(batch_size, self.n_kv_heads, R, dtype=self.state_dtype)
        return LinearAttentionState(kv, k_sum, like.new_zeros(batch_size, dtype=torch.long))

    def prefill_heads(
        self, heads: Heads[None], state: LinearAttentionState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """Attend in parallel, from a state to a state."""
        before = LinearState(state.kv, state.k_sum)
        o, after = self._attend(heads, before, causal=True, key_padding_mask=key_padding_mask)
        seen = heads.q.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(1)
        return o, LinearAttentionState(*after, state.position + seen)

    def step_heads(
        self, heads: Heads[None], state: LinearAttentionState
    ) -> tuple[Tensor, LinearAttentionState]:
        """Run one step of the recurrence."""
        q, k, v, positions, _ = heads
        kv, k_sum, position = state
        if self.rotary and positions is not None:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            token: Heads[None] = Heads(q, k, v, positions.unsqueeze(1))
            o, (kv, k_sum) = self._attend(token, LinearState(kv, k_sum), causal=True)
            o = o.squeeze(1)
        else:
            # What `linear_attention_step` does, without the checks that the projection makes superfluous.
            sizes = (q.shape[0], self.n_kv_heads, self.feature_map.feature_dim, self.value_dim)
            check_state(state, sizes, accumulation_dtype(q.dtype))
            phi: FeatureMap | None = self.feature_map
            if self.feature_map.positional:
                q, k, phi = *self._features(heads), None
            v = self._summable(v)
            o, kv, k_sum = kernels.linear_attention_step(q, k, v, kv, k_sum, None, self.normalize, phi)
        return o, LinearAttentionState(kv, k_sum, position + 1)

    def read(self, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> LinearState:
        """Sum up `memory [B,S,d_model]` as S `[B,G,R,M]` and z `[B,G,R]`, all that queries read of it."""
        k, v, key_padding_mask = self._read(memory, key_padding_mask)
        q = k.new_empty(k.shape[0], 0, self.n_heads, self.head_dim)
        heads: Heads[None] = Heads(q, k, v)
        _, state = self._attend(heads, None, causal=False, key_padding_mask=key_padding_mask)
        return state

    def recall_heads(self, q: Tensor, memory: LinearState) -> Tensor:
        """Attend to the sums."""
        k = q.new_empty(q.shape[0], 0, self.n_kv_heads, self.head_dim)
        v = q.new_empty(q.shape[0], 0, self.n_kv_heads, self.value_dim)
        o, _ = self._attend(Heads(q, k, v), memory, causal=False)
        return o

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, where no denominator has, and project back."""
        return super().merge_heads(o if self.normalize else self.head_norm(o), x)

    def _attend(
        self,
        heads: Heads[None],
        state: LinearState | None,
        *,
        causal: bool,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LinearState]:
        q, k = self._features(heads)
        v, positions = self._summable(heads.v), heads.positions
        if self.rotary and positions is not None:
            if self.normalize:
                return rotary_linear_attention(
                    q,
                    k,
                    v,
                    positions,
                    causal=causal,
                    key_padding_mask=key_padding_mask,
                    cu_seqlens=cu_seqlens,
                    state=state,
                )
            q, k = rotary(q, positions), rotary(k, positions)
        return linear_attention(
            q,
            k,
            v,
            causal=causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            state=state,
            return_state=True,
            normalize=self.normalize,
        )

    def _features(self, heads: Heads[None]) -> tuple[Tensor, Tensor]:
        phi, positions = self.feature_map, heads.positions
        return phi.phi_q(heads.q, positions), phi.phi_k(heads.k, positions)

    def _summable(self, v: Tensor) -> Tensor:
        """Widen half-precision values, unless a denominator keeps what they add up to in range."""
        return v if self.normalize else v.to(accumulation_dtype(v.dtype))
