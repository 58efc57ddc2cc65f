r"""Mamba-2: linear attention with a decay that depends on the input; heads share queries and keys.

    S_t = a_t S_{t-1} + d_t k_t v_t^T        o_t = S_t^T q_t + c v_t
    d_t = softplus(W_d x_t + b)              log a_t = -exp(A) d_t
    y_t = W_o norm(o_t * silu(W_g x_t))

Each head has a step size d_t, a pace exp(A) and a skip weight c. Queries and keys, called C and B in the
paper, belong to a group of heads, and values, called X, to one head. All three come from a short convolution
with silu (`conv`, 4 taps by default). norm is an RMS norm over the heads of a group.

Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
Space Duality", arXiv 2405.21060: eq. 2 (the recurrence, with a scalar times the identity for A), section 5
(scalar decay as masked attention), 7.1 (the layer), 7.2 (heads that share queries and keys).

Cost per head, with values M wide and chunks of C tokens (8 to 128, by backend): in training time
O(T (D M + C (D+M))) and memory O(T (D+M)); per generated token time, memory and state O(D M).
Cannot: run bidirectionally, read another sequence, or honour an arbitrary `attn_mask`.
Equals softmax attention: never. With a = 1, d = 1 and c = 0 it is unnormalised linear attention.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from unrolled.attention._decays import random_decay_biases
from unrolled.attention._heads import check_groups, of_every_head
from unrolled.attention._options import ONE_WAY
from unrolled.attention._state import total_decay, without_denominator
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.dense import Linear
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.linear import Keys, LinearState, linear_attention, linear_attention_step
from unrolled.ops.precision import accumulated, finite_exp
from unrolled.ops.sequence import Decayed


class Mamba2State(NamedTuple):
    """S `[B,H,D,M]`; its size never changes."""

    kv: Tensor


class Steps(NamedTuple):
    """The step sizes d and the logarithms of the decays a: `[...,H]` each."""

    size: Tensor
    log_decay: Tensor


class Mamba2(MultiHeadAttention[Mamba2State, Steps]):
    """The layer of Mamba-2, without the feed-forward layer that it replaces in the paper.

    Widths are those of the other mechanisms by default. In the paper the heads together are twice as wide as
    the model, and the state is 128 long: `n_heads=2 * d_model // 64, value_dim=64, head_dim=128`.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; must be causal, and every head has its own values.
            `conv` is 4 by default.
        n_groups: number of groups of heads that share queries and keys, a divisor of H.
        eps: added to the mean square of the norm.

    Raises:
        ValueError: n_groups, n_kv_heads or eps out of range.
        UnsupportedError: bidirectional attention, or rotary positions.
    """

    supports = CAUSAL_RECURRENCE.but(reads_input=True, sequence=True)
    one_way = ONE_WAY
    no_rotary = "the published model has no positions, since its state forgets; use retention, which rotates"
    conv_activation = conv_bias = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_groups: int = 1,
        eps: float = 1e-5,
        **common: Unpack[CommonOptions],
    ):
        check_groups(n_groups, n_heads, common.get("n_kv_heads"))
        self.n_groups = n_groups
        common.setdefault("conv", 4)
        super().__init__(d_model, n_heads, **common)
        self.step_proj = Linear(d_model, n_heads)
        # Paces start from 1 to H, as in the library transformers; step sizes are log-uniform, as published.
        self.log_pace = nn.Parameter(torch.arange(1.0, n_heads + 1).log())
        with torch.no_grad():
            self.step_proj.bias.copy_(random_decay_biases(n_heads))
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.gate_proj = Linear(d_model, n_heads * self.value_dim, bias=self.qkv_proj.bias is not None)
        self.norm = HeadRMSNorm(n_groups, n_heads // n_groups * self.value_dim, eps)

    def head_counts(self) -> tuple[int, int, int]:
        """Queries and keys belong to groups, values to heads."""
        return self.n_groups, self.n_groups, self.n_heads

    def read_input(self, x: Tensor) -> Steps:
        """Compute the step sizes d and the logarithms of the decays a, `[...,H]` each."""
        size = self.step_proj(x)
        size = softplus(accumulated(size))
        return Steps(size, -finite_exp(self.log_pace).to(size.dtype) * size)

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Gate the heads, normalise those of each group together, and project back."""
        o, gate = (torch.unflatten(y, -1, (self.n_groups, -1)) for y in (o.flatten(-2), self.gate_proj(x)))
        return super().merge_heads(self.norm(o, gate, gate_first=True), x)

    def attend(self, heads: Heads[Steps], masks: Masks) -> Tensor:
        """Attend in parallel."""
        return self._run(heads, None, masks)[0]

    def init_heads(self, batch_size: int) -> Mamba2State:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        size = (batch_size, self.n_heads, self.head_dim, self.value_dim)
        return Mamba2State(self.out_weight.new_zeros(size, dtype=self.state_dtype))

    def prefill_heads(
        self, heads: Heads[Steps], state: Mamba2State, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Mamba2State]:
        """Attend in parallel, continuing from a state."""
        o, after = self._run(heads, without_denominator(state.kv), Masks(key_padding_mask))
        return o, Mamba2State(after.kv)

    def summarise(self, heads: Heads[Steps], key_padding_mask: Tensor | None) -> Decayed:
        """Sum over these tokens; the earlier state decays by their step sizes."""
        (q, k, written, _), log_decay = self._rule(heads), heads.inputs.log_decay
        options: Keys = {"log_decay": log_decay, "key_padding_mask": key_padding_mask}
        _, own = linear_attention(q[:, :0], k, written, return_state=True, normalize=False, **options)
        return Decayed({"kv": own.kv}, total_decay(log_decay, key_padding_mask))

    def step_heads(self, heads: Heads[Steps], state: Mamba2State) -> tuple[Tensor, Mamba2State]:
        """Run one step of the recurrence."""
        q, k, written, v = self._rule(heads)
        before, log_decay = without_denominator(state.kv), heads.inputs.log_decay
        o, after = linear_attention_step(q, k, written, before, log_decay=log_decay, normalize=False)
        return self._skipped(o, v), Mamba2State(after.kv)

    def _run(
        self, heads: Heads[Steps], state: LinearState | None, masks: Masks
    ) -> tuple[Tensor, LinearState]:
        q, k, written, v = self._rule(heads)
        options: Keys = {"causal": True, "log_decay": heads.inputs.log_decay, **masks.of_keys()}
        o, after = linear_attention(q, k, written, state=state, return_state=True, normalize=False, **options)
        return self._skipped(o, v), after

    def _rule(self, heads: Heads[Steps]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q and k of every head, d v, and v, all in at least fp32."""
        q, k, v = (accumulated(x) for x in heads[:3])
        if self.short_conv is None:
            q, k, v = silu(q), silu(k), silu(v)
        q, k = of_every_head(q, self.n_heads), of_every_head(k, self.n_heads)
        return q, k, v * heads.inputs.size.unsqueeze(-1), v

    def _skipped(self, o: Tensor, v: Tensor) -> Tensor:
        return o + self.skip.to(o.dtype).unsqueeze(-1) * v
