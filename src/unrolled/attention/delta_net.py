r"""DeltaNet: linear attention that replaces what a key retrieves, rather than adding to it.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t / sqrt(D)

In two steps: the state decays, S <- a_t S; then S <- S + b_t k_t (v_t - S^T k_t)^T moves the value that k_t
retrieves towards v_t, one step of gradient descent on |S^T k_t - v_t|^2 / 2 with rate b_t. Queries and keys
have length 1, q = silu(W_q x) / |silu(W_q x)| and k likewise, and the rate is b = max_beta sigmoid(W_b x).
With `conv`, as in the published models, silu is applied after the convolution, to the values too.

DeltaNet has a = 1. Gated DeltaNet (`gated=True`) decays, log a = -exp(A) softplus(W_a x + c) with A and c
learned per head, and gates its output by silu(W_g x). With `bias=False` it is the layer of Qwen3-Next and,
with max_beta = 2, of OLMo-hybrid.

Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", arXiv 2406.06484: section 2.2 (the rule), 3.2 and 3.3 (by chunks, the layer). Yang, Kautz and
Hatamizadeh 2024, "Gated Delta Networks", arXiv 2412.06464: eq. 10 (the gated rule), section 3.4 (the layer).
The decay is that of Mamba-2 (arXiv 2405.21060); max_beta = 2 lets the state change sign along a key
(arXiv 2411.12537).

In chunks of C tokens (`ops/delta/chunked.py`), with L the cumulative log a of a chunk, D_ij = exp(L_i - L_j)
for i >= j, and S the state before it, the C corrections of a chunk solve a triangular system:

    (I + tril(diag(b) K K^T * D, -1)) [U, W] = diag(b) [V, diag(e^L) K]
    N = U - W S        O = diag(e^L) Q S + (Q K^T * D) N        S' = e^(L_C) S + (diag(e^(L_C - L)) K)^T N

Cost per head: in training time O(T (C (C+D+M) + D (D+M))) and memory O(T (C+D+M)), with C from 8 to 64, by
backend and width; per generated token time, memory and state O(D M).
Cannot: attend in both directions or to another sequence, nor honour an `attn_mask`. There is no denominator,
so each head's output is normalised.
Equals softmax attention: never. With b = 1, no decay and orthonormal keys it retrieves each value exactly.

With `rotary`, queries and keys are scaled to length 1 and then rotated, which keeps their length.
"""

from typing import Unpack

from torch import Tensor, nn
from torch.nn.functional import softplus

from unrolled.attention._decays import random_decay_biases, random_log_paces
from unrolled.attention._delta import DeltaRule, Rates
from unrolled.attention._heads import check_groups
from unrolled.attention._options import ONE_WAY
from unrolled.attention.base import CommonOptions
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.dense import Linear
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.options import check_finite
from unrolled.ops.precision import accumulation_dtype, finite_exp


class DeltaNet(DeltaRule):
    """DeltaNet and Gated DeltaNet.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; must be causal. Each of the G key and value heads
            has a state, a rate and a decay.
        gated: let the state decay, and gate the output.
        max_beta: largest rate, in (0, 2]; above 1 the state may change sign along a key.
        n_groups: number of groups of heads that share queries and keys, a divisor of H; every head then has
            a state of its own. None: each head has its own queries, and each key and value head its own keys.
        eps: added to the mean square of the norm.

    Raises:
        ValueError: max_beta, eps or n_groups out of range.
        UnsupportedError: bidirectional attention.
    """

    supports = CAUSAL_RECURRENCE.but(reads_input=True, sequence=True)
    one_way = ONE_WAY

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gated: bool = False,
        max_beta: float = 1.0,
        n_groups: int | None = None,
        eps: float = 1e-5,
        **common: Unpack[CommonOptions],
    ):
        if n_groups is not None:
            check_groups(n_groups, n_heads, common.get("n_kv_heads"))
        self.n_groups = n_groups
        super().__init__(d_model, n_heads, **common)
        check_finite(max_beta=max_beta)
        if not 0 < max_beta <= 2:
            raise ValueError(f"max_beta is {max_beta}, but must be above 0 and at most 2")
        self.gated, self.max_beta = gated, max_beta
        bias = self.qkv_proj.bias is not None
        self.beta_proj = Linear(d_model, self.n_kv_heads, bias=bias)
        self.norm = HeadRMSNorm(n_heads, self.value_dim, eps)
        if gated:
            self.decay_proj = Linear(d_model, self.n_kv_heads, bias=False)
            self.gate_proj = Linear(d_model, n_heads * self.value_dim, bias=bias)
            self.log_pace = nn.Parameter(random_log_paces(self.n_kv_heads))
            self.decay_bias = nn.Parameter(random_decay_biases(self.n_kv_heads))

    def head_counts(self) -> tuple[int, int, int]:
        """Numbers of heads of queries, keys and values."""
        return (
            super().head_counts() if self.n_groups is None else (self.n_groups, self.n_groups, self.n_heads)
        )

    def read_input(self, x: Tensor) -> Rates:
        """Compute the rates b and the logarithms of the decays a, `[...,G]` each."""
        dtype = accumulation_dtype(x.dtype)
        beta = self.max_beta * self.beta_proj(x).to(dtype).sigmoid()
        if not self.gated:
            return Rates(beta, None)
        pace = finite_exp(self.log_pace).to(dtype)
        return Rates(beta, -pace * softplus(self.decay_proj(x).to(dtype) + self.decay_bias.to(dtype)))

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, gate it if configured, and project back."""
        gate = self.gate_proj(x).unflatten(-1, o.shape[-2:]) if self.gated else None
        return super().merge_heads(self.norm(o, gate), x)
