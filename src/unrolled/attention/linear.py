r"""Linear attention: phi(q) . phi(k) in place of softmax's exp(q . k), which makes causal attention an RNN.

    o_i = phi(q_i)^T S_i / phi(q_i)^T z_i
    S_i = sum_{j <= i} phi(k_j) v_j^T = S_{i-1} + phi(k_i) v_i^T
    z_i = sum_{j <= i} phi(k_j)       = z_{i-1} + phi(k_i)

Bidirectional attention sums over all j. There is no 1/sqrt(D). The state of a step is (S, z).

Katharopoulos, Vyas, Pappas and Fleuret 2020, "Transformers are RNNs: Fast Autoregressive Transformers with
Linear Attention", arXiv 2006.16236: eq. 4-7 (definition), 8-12 (causal), 16-20 (recurrence).

Cost per head, with R features (R = D for elu), values M wide and chunks of C tokens (8 to 128, by backend):
in training time O(T (R M + C (R+M))) and memory O(T (R+M)); per generated token time, memory and state
O(R M).
Cannot: honour an arbitrary `attn_mask`, or attend sharply: the weights have rank at most R. With the
cosFormer map, which uses positions: attend to another sequence, or run beyond its `max_length`.
Equals softmax attention: never for a finite R. It is exact for its own kernel phi(q) . phi(k).

With `rotary` the features are rotated in the numerator only, as in RoFormer (arXiv 2104.09864, eq. 19):
rotated products may be negative, and a denominator made of them may vanish.

With `normalizer="rms"` the numerator of each head is divided by its own root mean square, in place of the
denominator, and scaled by learned weights. A small denominator makes gradients arbitrarily large (Qin et al.
2022, "The Devil in Linear Transformer", arXiv 2210.10340).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from unrolled.attention._options import GENERAL
from unrolled.attention._state import position_after
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.ops.feature_maps import FeatureMap, make_feature_map
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.linear import LinearOptions, LinearState, check_state, linear_attention
from unrolled.ops.linear import operator as kernels
from unrolled.ops.linear.chunked import Token, safe_divide
from unrolled.ops.positions import rotary
from unrolled.ops.precision import accumulated, accumulation_dtype
from unrolled.ops.sequence import Decayed


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
    rotate: Callable[[Tensor, Tensor], Tensor] = rotary,
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, LinearState]:
    """o_i = sum_j (R_i q_i . R_j k_j) v_j / sum_j q_i . k_j for features `q [B,T,H,R]`, `k [B,S,G,R]`.

    The queries are at the last T of the `positions [B,S]`. `rotate(x, positions)` applies R; `options` are
    those of `linear_attention`. Both sums are computed in at least fp32, since the first may overflow in
    fp16.

    Returns:
        `o [B,T,H,M]`, and the state: S of the rotated keys, z of the keys before rotation.
    """
    state = options.pop("state", None)
    dtype, out_dtype = accumulation_dtype(v.dtype), v.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    options["normalize"] = False
    sums = partial(linear_attention, return_state=True, **options)
    num, numerator_state = sums(rotate(q, last(positions, q)), rotate(k, positions), v, state=state)
    ones = v.new_ones(*v.shape[:3], 1)
    before = None if state is None else LinearState(state.k_sum.unsqueeze(-1), state.k_sum)
    den, denominator_state = sums(q, k, ones, state=before)
    return safe_divide(num, den).to(out_dtype), LinearState(numerator_state.kv, denominator_state.k_sum)


def last(positions: Tensor, q: Tensor) -> Tensor:
    """Return the positions of the queries `q [B,T,H,D]`, the last T of `positions [B,S]`."""
    return positions[:, positions.shape[1] - q.shape[1] :]


class LinearAttention(MultiHeadAttention[LinearAttentionState, None]):
    """Multi-head linear attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        feature_map: a name in `unrolled.ops.feature_maps.FEATURE_MAPS`, or a `FeatureMap` for this head
            width; a `QueryKeyMap` maps queries and keys differently.
        feature_map_options: further arguments of the named map, such as `{"max_length": 4096}`.
        normalizer: what the numerator is divided by: "sum", the denominator above, or "rms", its own root
            mean square.

    Raises:
        ValueError: an unknown normalizer or feature map, options that do not fit the map, or a map of another
            width, or with `rotary` one with an odd number of features.
    """

    supports = GENERAL.but(weights=True, sequence=True)
    rotates_features = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        feature_map: str | FeatureMap = "elu",
        feature_map_options: Mapping[str, Any] | None = None,
        normalizer: Literal["sum", "rms"] = "sum",
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        if normalizer not in ("sum", "rms"):
            raise ValueError(f"normalizer is {normalizer!r}, but must be 'sum' or 'rms'")
        if isinstance(feature_map, str):
            sizes = (self.head_dim, self.n_heads, self.n_kv_heads)
            feature_map = make_feature_map(feature_map, *sizes, **(feature_map_options or {}))
        elif feature_map_options is not None:
            raise ValueError("feature_map_options were given, but must be None for a FeatureMap object")
        if not isinstance(feature_map, FeatureMap):
            raise ValueError(f"feature_map is {feature_map!r}, but must be a name or a FeatureMap object")
        if feature_map.head_dim != self.head_dim:
            raise ValueError(
                f"feature_map has head_dim {feature_map.head_dim}, but must have {self.head_dim}"
            )
        least = self.rotary_dim or 2
        if self.rotary and (feature_map.feature_dim % 2 or feature_map.feature_dim < least):
            raise ValueError(
                f"feature_map has {feature_map.feature_dim} features, but needs an even number of at least "
                f"{least} with rotary"
            )
        self.feature_map = feature_map
        self.normalize = normalizer == "sum"
        if self.rotary or not self.normalize:  # the weights of a query do not add up to 1
            self.supports = self.supports.but(weights=False)
        if not self.normalize:
            self.head_norm = HeadRMSNorm(n_heads, self.value_dim)
        if feature_map.positional:  # positions of two sequences cannot be compared
            self.supports = self.supports.but(positions=True, cross=False, single_queries=False)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        return self._attend(heads, None, masks, causal=self.causal)[0]

    def init_heads(self, batch_size: int) -> LinearAttentionState:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        like, R = self.out_weight, self.feature_map.feature_dim
        kv = like.new_zeros(batch_size, self.n_kv_heads, R, self.value_dim, dtype=self.state_dtype)
        k_sum = like.new_zeros(batch_size, self.n_kv_heads, R, dtype=self.state_dtype)
        return LinearAttentionState(kv, k_sum, like.new_zeros(batch_size, dtype=torch.long))

    def prefill_heads(
        self, heads: Heads[None], state: LinearAttentionState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """Attend in parallel, continuing from a state."""
        before = LinearState(state.kv, state.k_sum)
        o, after = self._attend(heads, before, Masks(key_padding_mask), causal=True)
        return o, LinearAttentionState(*after, position_after(state.position, heads.q, key_padding_mask))

    def summarise(self, heads: Heads[None], key_padding_mask: Tensor | None) -> Decayed:
        """Sum over these tokens; the earlier state is kept."""
        _, own = self._attend(heads.without_queries(), None, Masks(key_padding_mask), causal=False)
        return Decayed(own._asdict(), own.k_sum.new_zeros(own.k_sum.shape[:2]))

    def step_heads(
        self, heads: Heads[None], state: LinearAttentionState
    ) -> tuple[Tensor, LinearAttentionState]:
        """Run one step of the recurrence."""
        q, k, v, positions, *_ = heads
        kv, k_sum, position = state
        if self.rotary and positions is not None:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            token: Heads[None] = Heads(q, k, v, positions.unsqueeze(1))
            o, (kv, k_sum) = self._attend(token, LinearState(kv, k_sum), Masks(), causal=True)
            o = o.squeeze(1)
        else:
            # Like `linear_attention_step`, but without the checks that the projections make redundant.
            sizes = (q.shape[0], self.n_kv_heads, self.feature_map.feature_dim, self.value_dim)
            check_state(state, sizes, accumulation_dtype(q.dtype), q)
            phi: FeatureMap | None = self.feature_map
            if self.feature_map.positional:
                q, k, phi = *self._features(heads), None
            v = self._summable(v)
            o, kv, k_sum = kernels.linear_attention_step(Token(q, k, v, kv, k_sum, None), self.normalize, phi)
        return o, LinearAttentionState(kv, k_sum, position + 1)

    def read(self, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> LinearState:
        """Reduce `memory [B,S,d_model]` to the sums that queries need: S `[B,G,R,M]` and z `[B,G,R]`."""
        k, v = self._read(memory, key_padding_mask)
        q = k.new_empty(k.shape[0], 0, self.n_heads, self.head_dim)
        heads: Heads[None] = Heads(q, k, v)
        return self._attend(heads, None, Masks(key_padding_mask), causal=False)[1]

    def recall_heads(self, q: Tensor, memory: LinearState) -> Tensor:
        """Attend to the memory through its sums."""
        k = q.new_empty(q.shape[0], 0, self.n_kv_heads, self.head_dim)
        v = q.new_empty(q.shape[0], 0, self.n_kv_heads, self.value_dim)
        return self._attend(Heads(q, k, v), memory, Masks(), causal=False)[0]

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise each head by its RMS if configured, and project back."""
        return super().merge_heads(o if self.normalize else self.head_norm(o), x)

    def _attend(
        self, heads: Heads[None], state: LinearState | None, masks: Masks, *, causal: bool
    ) -> tuple[Tensor, LinearState]:
        q, k, v, positions, *_ = heads
        v, common, phi = self._summable(v), masks.of_keys(), None
        if self.rotary or self.feature_map.positional:
            q, k = self._features(heads)
        else:
            phi = self.feature_map
        if self.rotary and positions is not None:
            if self.normalize:
                return rotary_linear_attention(
                    q, k, v, positions, self.rotate, causal=causal, state=state, **common
                )
            q, k = self.rotate(q, last(positions, q)), self.rotate(k, positions)
        return linear_attention(
            *(q, k, v),
            causal=causal,
            state=state,
            return_state=True,
            normalize=self.normalize,
            feature_map=phi,
            **common,
        )

    def _features(self, heads: Heads[None]) -> tuple[Tensor, Tensor]:
        phi, positions = self.feature_map, heads.positions
        of_queries = positions
        if positions is not None and positions.dim() == 2:
            of_queries = last(positions, heads.q)
        return phi.phi_q(heads.q, of_queries), phi.phi_k(heads.k, positions)

    def _summable(self, v: Tensor) -> Tensor:
        """Convert half-precision values to fp32 if no denominator keeps their sum in range."""
        return v if self.normalize else accumulated(v)
