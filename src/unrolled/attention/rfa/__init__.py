r"""Random feature attention (RFA): linear attention whose features estimate a Gaussian kernel of directions.

    o_i = phi(q_i)^T S_i / phi(q_i)^T z_i
    S_i = g_i S_{i-1} + (1 - g_i) phi(k_i) v_i^T        z_i = g_i z_{i-1} + (1 - g_i) phi(k_i)

Without the gate, g_i and 1 - g_i are both 1, and bidirectional attention sums over all keys. Only the
directions of queries and keys matter: with u = x / |x|, a learned scale s in R^D for each key/value head
(initially 1) and n rows of W drawn from N(0, I),

    fourier   phi(x) = [sin(W(s u)), cos(W(s u))] / sqrt(n)    E[phi(x) . phi(y)] = exp(-|s(u_x - u_y)|^2 / 2)
    arccos    phi(x) = relu(W(s u)) / sqrt(n)                  half the arc-cosine kernel of order 1 of s u

The gate (RFA-Gate) is one number per key/value head and token, g_i = sigmoid(w . x_i + b), by which a head
forgets. Initially w = 0, and g is from 0.9 to 0.99 across the heads, a memory of 10 to 100 tokens.

Peng, Pappas, Yogatama, Schwartz, Smith and Kong 2021, "Random Feature Attention", arXiv 2103.02143: theorem 1
(features), section 3.1 (attention), section 3.2 (gate). The paper draws rows of variance s^2 but states the
kernel with 1 / s^2; here s multiplies, as in the authors' code. `rotary` rotates the vectors s u, so that
weights depend on distances for any s. The paper's stateful variant carries the state from segment to segment:
call `prefill` with the detached state of the one before.

Cost per head, with R = 2n features (n for arccos), values M wide and chunks of C tokens (8 to 128, by
backend): in training time O(T R (D + M + C)) and memory O(T R); per generated token time O(R (D + M)), memory
and state O(R M).
Cannot: honour an arbitrary `attn_mask`, or distinguish keys of one direction; with the gate it is causal
only. Fourier features may be negative: with mean(s^2) above about 3 their divisor may be small or negative
(`signed_linear_attention`), and a warning says so. Arccos features are not negative.
Equals softmax attention: in the limit of large n, for fourier features without the gate and with equal
entries of s, with scores s^2 u_q . u_k.
"""

from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from unrolled.attention._options import GENERAL
from unrolled.attention._state import position_after, total_decay
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.attention.rfa.features import RfaMap
from unrolled.attention.rfa.sums import RfaSums, gate_weights, gated
from unrolled.contract import UnsupportedError
from unrolled.ops.dense import Linear
from unrolled.ops.linear import LinearOptions, linear_attention
from unrolled.ops.masks import without_padding
from unrolled.ops.random_features import Rows
from unrolled.ops.sequence import Decayed


class RfaState(NamedTuple):
    """The sums of `RfaSums`, the number of tokens seen `[B]`, and the number of redraws `[B]`."""

    kv: Tensor
    k_sum: Tensor
    weight: Tensor
    position: Tensor
    draw: Tensor


class Gate(NamedTuple):
    """Logits of g `[...,G]`."""

    logits: Tensor


class RandomFeatureAttention(MultiHeadAttention[RfaState, Gate | None]):
    """Multi-head random feature attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        features: "fourier" or "arccos".
        n_features: number n of rows of W for each key/value head.
        gate: forget as RFA-Gate does; causal self-attention only.
        rows: "orthogonal", "regularised" or "independent", see `draw_rows`.
        seed: seed of the rows; by default drawn from torch's generator like initial weights.

    Raises:
        ValueError: unknown features or rows, or sizes out of range.
        UnsupportedError: bidirectional attention with a gate.
    """

    supports = GENERAL.but(sequence=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        features: str = "fourier",
        n_features: int = 64,
        gate: bool = False,
        rows: Rows = "orthogonal",
        seed: int | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        if gate:
            self.supports = self.supports.but(bidirectional=False, cross=False, reads_input=True)
            if not self.causal:
                raise UnsupportedError("the gate of rfa is causal: use causal=True or gate=False")
        self.feature_map = RfaMap(self.n_kv_heads, self.head_dim, features, n_features, rows, seed)
        self.gate_proj = Linear(d_model, self.n_kv_heads) if gate else None
        if self.gate_proj is not None:
            # g = 1 - 10^-1 ... 1 - 10^-2, in equal steps of the exponent
            forgotten = torch.logspace(-1, -2, self.n_kv_heads)
            with torch.no_grad():
                self.gate_proj.weight.zero_()
                self.gate_proj.bias.copy_(-torch.logit(forgotten))

    def read_input(self, x: Tensor) -> Gate | None:
        """Compute the logits of the gates `[...,G]`."""
        return None if self.gate_proj is None else Gate(self.gate_proj(x))

    def redraw(self) -> None:
        """Draw new rows; see `PerformerAttention.redraw`."""
        self.feature_map.projection.redraw()

    def attend(self, heads: Heads[Gate | None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        return self._run(heads, None, masks)[0]

    def init_heads(self, batch_size: int) -> RfaState:
        """Make the state of `batch_size` sequences before their first token."""
        like, R = self.out_weight, self.feature_map.feature_dim
        kv = like.new_zeros(batch_size, self.n_kv_heads, R, self.value_dim, dtype=self.state_dtype)
        draw = self.feature_map.projection.redraws.repeat(batch_size)
        weight = kv.new_full(kv.shape[:2], 1.0 if self.gate_proj is None else 0.0)
        return RfaState(kv, kv.new_zeros(kv.shape[:3]), weight, torch.zeros_like(draw), draw)

    def prefill_heads(
        self, heads: Heads[Gate | None], state: RfaState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, RfaState]:
        """Attend in parallel, continuing from a state."""
        o, after = self._run(heads, RfaSums(*state[:3]), Masks(key_padding_mask))
        o = self.feature_map.projection.unless_redrawn(o, state.draw)
        return o, RfaState(*after, position_after(state.position, heads.q, key_padding_mask), state.draw)

    def summarise(self, heads: Heads[Gate | None], key_padding_mask: Tensor | None) -> Decayed:
        """Sum over these tokens; the earlier state decays by their gates."""
        _, k, logits = self._features(heads)
        if key_padding_mask is not None:
            k = without_padding(k, key_padding_mask)
            logits = None if logits is None else without_padding(logits, key_padding_mask)
        keys, log_decay = gated(k, logits)
        options: LinearOptions = {"log_decay": log_decay, "key_padding_mask": key_padding_mask}
        q = heads.q.new_empty(len(k), 0, *k.shape[2:])
        _, own = linear_attention(q, keys, heads.v, return_state=True, **options)
        sums = own._asdict()
        if logits is None or log_decay is None:
            return Decayed(sums, own.k_sum.new_zeros(own.k_sum.shape[:2]))
        _, weight = gate_weights(0, logits.to(k.dtype), None, options)
        return Decayed({**sums, "weight": weight}, total_decay(log_decay, key_padding_mask))

    def step_heads(self, heads: Heads[Gate | None], state: RfaState) -> tuple[Tensor, RfaState]:
        """Run one step of the recurrence."""
        q, k, logits = self._features(heads)
        before = RfaSums(*state[:3])
        o, after = self.feature_map.kernel.step(q, k, heads.v, before, gate_logits=logits)
        o = self.feature_map.projection.unless_redrawn(o, state.draw)
        return o, RfaState(*after, state.position + 1, state.draw)

    def _run(self, heads: Heads[Gate | None], state: RfaSums | None, masks: Masks) -> tuple[Tensor, RfaSums]:
        q, k, logits = self._features(heads)
        attend, common = self.feature_map.kernel.attend, masks.of_keys()
        return attend(q, k, heads.v, gate_logits=logits, causal=self.causal, state=state, **common)

    def _features(self, heads: Heads[Gate | None]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the features of queries and keys, and the logits of the gates."""
        self.feature_map.warn_if_sharp()
        rotate = None if heads.positions is None else partial(self.rotate, positions=heads.positions)
        q, k = (self.feature_map(x, rotate) for x in heads[:2])
        return q, k, None if heads.inputs is None else heads.inputs.logits

    def refuse(self, capability: str, given: Tensor | None, what: str) -> None:
        """Refuse another sequence if there is a gate, with advice."""
        if self.gate_proj is not None and capability == "cross" and given is not None:
            raise UnsupportedError(f"the gate of rfa reads a single sequence; use gate=False for {what}")
        super().refuse(capability, given, what)
