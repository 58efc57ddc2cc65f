r"""Gated linear attention: each feature of the state decays at a rate that depends on the input (GLA).

    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T        o_t = S_t^T q_t / sqrt(D)
    alpha_t = sigmoid(W_2 W_1 x_t + b)^(1/16)      W_1 to 16 numbers, W_2 to the D features of each key head
    y_t = W_o (swish(W_g x_t) * norm_h(o_t))

The root keeps alpha close to 1, so that heads start with a long memory. norm_h is an RMS norm of each head,
in place of a denominator. Positions need no encoding, since older tokens have passed more gates.

Yang, Wang, Shen, Panda and Kim 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training",
arXiv 2312.06635: section 4.1 (recurrent and parallel), 4.2 (by chunks), 4.4 (gates, norm, output gate).

Cost per head, with values M wide and chunks of C tokens (8 to 128, by backend): in training time
O(T (D M + C (D+M))) and memory O(T (D+M)); per generated token time, memory and state O(D M). In the C++
kernels a gate for each feature takes 1.2 to 1.5 times as long as one gate per head.
Cannot: run bidirectionally, read another sequence, or honour an arbitrary `attn_mask`.
Equals softmax attention: never. With alpha = 1, without norm and gate, it is unnormalised linear attention.
"""

from typing import NamedTuple, Unpack

from torch import Tensor
from torch.nn.functional import logsigmoid

from unrolled.attention._options import ONE_WAY
from unrolled.attention._state import total_decay
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.dense import Linear
from unrolled.ops.gla import diagonal_linear_attention, diagonal_linear_attention_step
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.options import check_above_zero, check_integers
from unrolled.ops.precision import accumulated, accumulation_dtype
from unrolled.ops.sequence import Decayed


class GatedLinearState(NamedTuple):
    """S `[B,G,D,M]`; its size never changes."""

    kv: Tensor


class Decay(NamedTuple):
    """log alpha `[...,G,D]`, the logarithm of the share of the state that remains."""

    log_alpha: Tensor


class GatedLinearAttention(MultiHeadAttention[GatedLinearState, Decay]):
    """Multi-head gated linear attention, behind a swish gate.

    Widths are those of the other mechanisms by default, so that a model keeps its shape when its attention
    changes; the paper halves the width of queries and keys: `head_dim=d_model // (2 * n_heads)` with
    `value_dim=d_model // n_heads`.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; must be causal.
        gate_rank: width between the two matrices that compute the gates.
        temperature: alpha is the sigmoid to the power 1 / temperature; above 0.

    Raises:
        ValueError: a size or the temperature is out of range.
        UnsupportedError: bidirectional attention, or rotary positions.
    """

    supports = CAUSAL_RECURRENCE.but(reads_input=True, sequence=True)
    one_way = ONE_WAY
    no_rotary = (
        "features that decay at different rates cannot be rotated into each other; use retention, which has "
        "one rate per head"
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_rank: int = 16,
        temperature: float = 16.0,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_integers(1, gate_rank=gate_rank)
        check_above_zero(temperature=temperature)
        self.temperature = temperature
        self.decay_down = Linear(d_model, gate_rank, bias=False)
        self.decay_up = Linear(gate_rank, self.n_kv_heads * self.head_dim)
        self.head_norm = HeadRMSNorm(n_heads, self.value_dim)
        self.gate_proj = Linear(d_model, n_heads * self.value_dim, bias=self.qkv_proj.bias is not None)

    def read_input(self, x: Tensor) -> Decay:
        """Compute log alpha `[...,G,D]`, in at least fp32."""
        z = self.decay_up(self.decay_down(x))
        log_alpha = logsigmoid(accumulated(z)) / self.temperature
        return Decay(log_alpha.reshape(*x.shape[:-1], self.n_kv_heads, self.head_dim))

    def attend(self, heads: Heads[Decay], masks: Masks) -> Tensor:
        """Attend in parallel."""
        return diagonal_linear_attention(*self._rule(heads), **masks.of_keys())

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, gate it, and project."""
        return super().merge_heads(self.head_norm(o, self.gate_proj(x).reshape(o.shape)), x)

    def init_heads(self, batch_size: int) -> GatedLinearState:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        size = (batch_size, self.n_kv_heads, self.head_dim, self.value_dim)
        return GatedLinearState(self.out_weight.new_zeros(size, dtype=self.state_dtype))

    def prefill_heads(
        self, heads: Heads[Decay], state: GatedLinearState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, GatedLinearState]:
        """Attend in parallel, continuing from a state."""
        o, kv = diagonal_linear_attention(
            *self._rule(heads), key_padding_mask=key_padding_mask, state=state.kv, return_state=True
        )
        return o, GatedLinearState(kv)

    def summarise(self, heads: Heads[Decay], key_padding_mask: Tensor | None) -> Decayed:
        """Sum over these tokens; the earlier state decays by their gates."""
        q, k, v, log_alpha = self._rule(heads)
        _, kv = diagonal_linear_attention(
            q[:, :0], k, v, log_alpha, key_padding_mask=key_padding_mask, return_state=True
        )
        return Decayed({"kv": kv}, total_decay(log_alpha, key_padding_mask))

    def step_heads(self, heads: Heads[Decay], state: GatedLinearState) -> tuple[Tensor, GatedLinearState]:
        """Run one step of the recurrence."""
        o, kv = diagonal_linear_attention_step(*self._rule(heads), state.kv)
        return o, GatedLinearState(kv)

    def _rule(self, heads: Heads[Decay]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scaled q, k, v and log alpha in at least fp32: sums without a denominator may be large."""
        dtype = accumulation_dtype(heads.q.dtype)
        q, k, v = (x.to(dtype) for x in heads[:3])
        return q * self.head_dim**-0.5, k, v, heads.inputs.log_alpha
