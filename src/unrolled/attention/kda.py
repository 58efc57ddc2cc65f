r"""Kimi Delta Attention (KDA): the delta rule, with a decay of its own for every feature of the keys.

    S_t = (I - b_t k_t k_t^T) diag(a_t) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t / sqrt(D)
    log a_t = -exp(A) softplus(W_2 W_1 x_t + c)        b_t = sigmoid(W_b x_t)
    y_t = W_o (sigmoid(W_4 W_3 x_t) * norm_h(o_t))

In two steps: the rows of the state decay, S <- diag(a_t) S; then S <- S + b_t k_t (v_t - S^T k_t)^T moves
the value that k_t retrieves towards v_t. Queries, keys and values come from a short convolution with silu
(`conv`, 4 taps by default); queries and keys are then divided by their lengths. A is learned per head, c per
feature; W_1 and W_3 project to `gate_rank` numbers. norm_h is an RMS norm of each head, in place of a
denominator. With `bias=False` it is the layer of Kimi-Linear.

Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv 2510.26692: eq. 1 (the
rule), section 4 (the layer). It is Gated DeltaNet (`delta_net`) with a gate for every feature, as in
`gated_linear`.

In chunks of C tokens (`ops/delta/chunked.py`), with L [C,D] the cumulative log a of a chunk, and S the state
before it, the C corrections of a chunk solve a triangular system. For x, y = K or Q:

    P(x, y)_ij = sum_c x_ic y_jc exp(L_ic - L_jc) for i >= j
    (I + tril(diag(b) P(K, K), -1)) [U, W] = diag(b) [V, e^L * K]
    N = U - W S        O = (e^L * Q) S + P(Q, K) N        S' = diag(e^(L_C)) S + (e^(L_C - L) * K)^T N

Cost per head: in training time O(T (C (C+D+M) + D (D+M))) and memory O(T (C+D+M)), with C from 8 to 64, by
backend and width; per generated token time, memory and state O(D M).
Cannot: attend in both directions or to another sequence, nor honour an `attn_mask`.
Equals softmax attention: never. With b = 1, no decay and orthonormal keys it retrieves each value exactly.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from unrolled.attention._decays import random_decay_biases, random_log_paces
from unrolled.attention._delta import DeltaRule, Rates
from unrolled.attention._options import ONE_WAY
from unrolled.attention.base import CommonOptions
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.dense import Linear
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.options import check_integers
from unrolled.ops.precision import accumulation_dtype, finite_exp


class KimiDeltaAttention(DeltaRule):
    """Kimi Delta Attention, behind a sigmoid gate.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; must be causal. Each of the G key and value heads
            has a state, a rate and D decays. `conv` is 4 by default.
        gate_rank: width between the two matrices that compute the decays, and the gate of the output; the
            width of a head by default, as published.
        eps: added to the mean square of the norm.

    Raises:
        ValueError: gate_rank or eps out of range.
        UnsupportedError: bidirectional attention, or rotary positions.
    """

    supports = CAUSAL_RECURRENCE.but(reads_input=True, sequence=True)
    one_way = ONE_WAY
    not_decayed = ("decay_bias",)
    no_rotary = (
        "features that decay at different rates cannot be rotated into each other; use delta_net, which has "
        "one rate per head"
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_rank: int | None = None,
        eps: float = 1e-5,
        **common: Unpack[CommonOptions],
    ):
        common.setdefault("conv", 4)
        super().__init__(d_model, n_heads, **common)
        rank, bias = self.head_dim if gate_rank is None else gate_rank, self.qkv_proj.bias is not None
        check_integers(1, gate_rank=rank)
        self.beta_proj = Linear(d_model, self.n_kv_heads, bias=bias)
        self.decay_down = Linear(d_model, rank, bias=False)
        self.decay_up = Linear(rank, self.n_kv_heads * self.head_dim, bias=False)
        self.log_pace = nn.Parameter(random_log_paces(self.n_kv_heads))
        self.decay_bias = nn.Parameter(random_decay_biases(self.n_kv_heads, self.head_dim))
        self.gate_down = Linear(d_model, rank, bias=False)
        self.gate_up = Linear(rank, n_heads * self.value_dim, bias=bias)
        self.norm = HeadRMSNorm(n_heads, self.value_dim, eps)

    def read_input(self, x: Tensor) -> Rates:
        """Compute the rates b `[...,G]` and the logarithms of the decays a `[...,G,D]`."""
        dtype = accumulation_dtype(x.dtype)
        beta = self.beta_proj(x).to(dtype).sigmoid()
        z = self.decay_up(self.decay_down(x)).to(dtype)
        z = torch.unflatten(z, -1, self.decay_bias.shape) + self.decay_bias.to(dtype)
        return Rates(beta, -finite_exp(self.log_pace).to(dtype).unsqueeze(-1) * softplus(z))

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, gate it, and project back."""
        gate = torch.unflatten(self.gate_up(self.gate_down(x)), -1, o.shape[-2:])
        return super().merge_heads(self.norm(o, gate, "sigmoid"), x)
