r"""DeltaNet: linear attention that replaces what a key retrieves, rather than adding to it.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t

In two steps: the state decays, S <- a_t S; then S <- S + b_t k_t (v_t - S^T k_t)^T moves the value that k_t
retrieves towards v_t, one step of gradient descent on |S^T k_t - v_t|^2 / 2 with rate b_t. Queries and keys
have length 1, q = silu(W_q x) / |silu(W_q x)| and k likewise, and the rate is b = max_beta sigmoid(W_b x).

DeltaNet has a = 1. Gated DeltaNet (`gated=True`) decays, log a = -exp(A) softplus(W_a x + c) with A and c
learned per head, and gates its output by silu(W_g x).

Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", arXiv 2406.06484: section 2.2 (the rule), 3.2 and 3.3 (by chunks, the layer). Yang, Kautz and
Hatamizadeh 2024, "Gated Delta Networks", arXiv 2412.06464: eq. 10 (the gated rule), section 3.4 (the layer).
The decay is that of Mamba-2 (arXiv 2405.21060); max_beta = 2 lets the state change sign along a key
(arXiv 2411.12537).

In chunks of C tokens, with L the cumulated log a of a chunk, D_ij = exp(L_i - L_j) for i >= j, and S the
state before it, the C corrections of a chunk solve a triangular system:

    (I + tril(diag(b) K K^T * D, -1)) [U, W] = diag(b) [V, diag(e^L) K]
    N = U - W S        O = diag(e^L) Q S + (Q K^T * D) N        S' = e^(L_C) S + (diag(e^(L_C - L)) K)^T N

Cost per head: in training time O(T (C (C+D+M) + D (D+M))) and memory O(T (C+D+M)), with C = 32, or 64 for
heads wider than 64; per generated token time, memory and state O(D M).
Cannot: read in both directions or from another sequence, nor honour an `attn_mask`. There is no denominator,
so each head's output is normalised. The short convolutions of the published models are left out.
Equals softmax attention: never. With b = 1, no decay and orthonormal keys it retrieves each value exactly.

With `rotary`, queries and keys are rotated after they are scaled to length 1, which rotation keeps.
"""

import math
from itertools import pairwise
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from unrolled.attention._options import CAUSAL_ONLY
from unrolled.attention._state import advance
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.ops.checks import (
    check_cu_seqlens,
    check_key_padding_mask,
    check_qkv,
    check_step,
    may_read,
    shape,
)
from unrolled.ops.chunks import join_chunks, split_chunks
from unrolled.ops.dense import Linear
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.linear.chunked import LOWEST_GATE, decay_between
from unrolled.ops.masks import without_padding
from unrolled.ops.node import one_node
from unrolled.ops.options import check_finite
from unrolled.ops.packing import length_buckets
from unrolled.ops.positions import rotary
from unrolled.ops.precision import accumulation_dtype, exact_dtype, without_autocast


class DeltaNetState(NamedTuple):
    """S `[B,G,D,M]`, and the number of tokens seen `[B]`; its size never changes."""

    kv: Tensor
    position: Tensor


def _like_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *_: object, cu_seqlens: Tensor | None = None, **__: object
) -> tuple[Tensor, Tensor]:
    rows = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    after = k.new_empty(rows, *k.shape[2:], v.shape[3], dtype=dtype)
    return v.new_empty(*q.shape[:3], v.shape[3]), after


@one_node(_like_delta_rule)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule over whole sequences, by chunks (equations above).

    Args:
        q: queries `[B,T,H,D]`; they are not scaled.
        k: keys `[B,T,G,D]` of length at most 1; query head h reads state h // (H/G).
        v: values `[B,T,G,M]`.
        beta: rates `[B,T,G]`, from 0 (write nothing) to 2; 1 replaces what a unit key held.
        log_decay: natural logarithm of the gates a `[B,T,G]`, at most 0; minus infinity clears the state.
        key_padding_mask: `[B,T]`, True = padding, which leaves the state as it was.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).
        state: S `[B,G,D,M]` before the first token, N rows with `cu_seqlens`; zeros by default.

    Returns:
        `o [B,T,H,M]` in the type of `v`, and the state after the last token, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: an argument of another shape or type; on a CPU and uncompiled, where values can be read at
            no cost, keys longer than 1 (the rule may diverge), rates outside [0, 2] and positive `log_decay`.
    """
    q, k, v, beta, log_decay, state = _prepare(q, k, v, beta, log_decay, key_padding_mask, cu_seqlens, state)
    if cu_seqlens is None:
        return _chunked(q, k, v, beta, log_decay=log_decay, state=state)
    o, after = v.new_zeros(*q.shape[:3], v.shape[3]), torch.zeros_like(state)
    for rows, tokens, padding in length_buckets(cu_seqlens, q.shape[1]):
        part = [without_padding(x[0, tokens], padding) for x in (q, k, v, beta)]
        gates = None if log_decay is None else without_padding(log_decay[0, tokens], padding)
        o_part, after[rows] = _chunked(*part, log_decay=gates, state=state[rows])
        o[0, tokens[~padding]] = o_part[~padding]
    return o, after


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, *, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run one token: the state decays, is updated at k, and is read at q.

    Args:
        q: query `[B,H,D]`.
        k: key `[B,G,D]` of length at most 1.
        v: value `[B,G,M]`.
        beta: rate `[B,G]`.
        state: S `[B,G,D,M]`; it is not changed.
        log_decay: `[B,G]`, at most 0.

    Returns:
        `o [B,H,M]` in the type of `v`, and the new state.
    """
    check_step(q, k, v)
    _check_rule(q, k, v, beta, log_decay, state, k.shape[0])
    (B, H, D), (_, G, M), dtype = q.shape, v.shape, state.dtype
    with without_autocast(q.device):
        if log_decay is not None:
            state = state * log_decay.to(dtype).exp()[..., None, None]
        key = k.to(dtype).unsqueeze(-2)
        correction = beta.to(dtype)[..., None, None] * (v.to(dtype).unsqueeze(-2) - key @ state)
        state = state + key.mT * correction
        o = q.to(dtype).reshape(B, G, H // G, D) @ state
        return o.reshape(B, H, M).to(v.dtype), state


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what `delta_rule` does by its definition, token by token, with the same arguments."""
    q, k, v, beta, log_decay, state = _prepare(q, k, v, beta, log_decay, key_padding_mask, cu_seqlens, state)
    gates = torch.zeros_like(beta) if log_decay is None else log_decay
    B, T = q.shape[:2]
    # Each sequence: its row among the inputs, and where it begins and ends there.
    spans = (
        [(b, 0, T) for b in range(B)]
        if cu_seqlens is None
        else [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    )
    o, states = v.new_zeros(*q.shape[:3], v.shape[3]), []
    for n, (b, start, end) in enumerate(spans):
        S = state[n : n + 1]
        for t in range(start, end):
            q_t, k_t, v_t, beta_t, gate_t = (x[b : b + 1, t] for x in (q, k, v, beta, gates))
            o[b, t], S = delta_rule_step(q_t, k_t, v_t, beta_t, S, log_decay=gate_t)
        states.append(S)
    return o, torch.cat([state[:0], *states])


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    (B, T, _, D), (G, M), dtype, exact = q.shape, v.shape[2:], state.dtype, exact_dtype(q.device)
    n = max(1, math.ceil(T / (32 if max(D, M) <= 64 else 64)))  # wide states make long chunks cheaper
    C = max(1, math.ceil(T / n))
    with without_autocast(q.device):
        qs, ks, vs = (split_chunks(x.to(dtype), n, C, G) for x in (q, k, v))
        rates = split_chunks(beta.to(dtype).unsqueeze(-1), n, C, G)
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        if log_decay is None:
            within, from_start, to_end, through = lower.to(dtype), *[qs.new_ones(1)] * 3
        else:
            gates = log_decay.clamp(min=LOWEST_GATE).to(exact).unsqueeze(-1)
            L = split_chunks(gates, n, C, G).squeeze(-1).cumsum(-1)
            within = decay_between(L, L, lower, dtype)
            from_start, to_end, through = (
                x.to(dtype).exp().unsqueeze(-1) for x in (L, L[..., -1:] - L, L[..., -1:])
            )
        # Only the part below the diagonal is read; the diagonal is 1. With similar keys and rates near 2 the
        # solution alternates in sign, and would lose digits in fp32 that single steps keep.
        keys, values = ks.to(exact), vs.to(exact)
        system = rates * (keys @ keys.mT) * within
        right_side = rates * torch.cat([values, from_start * keys], dim=-1)
        solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        U, W = solution.to(dtype).split([M, D], dim=-1)
        # S' = (e^(L_C) I - K'^T W) S + K'^T U: only one product per chunk depends on the previous state.
        kept = (through * torch.eye(D, dtype=dtype, device=q.device) - (to_end * ks).mT @ W).squeeze(2)
        written = ((to_end * ks).mT @ U).squeeze(2)
        states = [state.reshape(B * G, D, M)]
        for kept_c, written_c in zip(kept.unbind(1), written.unbind(1), strict=True):
            states.append(torch.baddbmm(written_c, kept_c, states[-1]))
        S = torch.stack(states[:-1], dim=1).unsqueeze(2)
        o = (from_start * qs) @ S + (qs @ ks.mT * within) @ (U - W @ S)
        return join_chunks(o, B, T, G).to(v.dtype), states[-1].reshape(B, G, D, M)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Check every argument, make a zero state by default, and zero the inputs at padding."""
    check_qkv(q, k, v)
    (B, T), (_, _, G, D), M = q.shape[:2], k.shape, v.shape[3]
    if k.shape[1] != T:
        raise ValueError(f"k has shape {shape(k)}, but must be [{B}, {T}, G, {D}] for q {shape(q)}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, k)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is None:
        state = q.new_zeros(N, G, D, M, dtype=accumulation_dtype(q.dtype, k.dtype, v.dtype))
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, B, T)
        q, k, v = (without_padding(x, key_padding_mask) for x in (q, k, v))
        if beta.shape[:2] == (B, T):
            beta = without_padding(beta, key_padding_mask)
        if log_decay is not None and log_decay.shape[:2] == (B, T):
            log_decay = without_padding(log_decay, key_padding_mask)
    _check_rule(q, k, v, beta, log_decay, state, N)
    return q, k, v, beta, log_decay, state


def _check_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor, rows: int
) -> None:
    (*_, G, D), M = k.shape, v.shape[-1]
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    if shape(state) != [rows, G, D, M] or state.dtype != dtype:
        raise ValueError(
            f"state is {state.dtype} of shape {shape(state)}, but must be {dtype} {[rows, G, D, M]}"
        )
    for name, x in (("beta", beta), ("log_decay", log_decay)):
        if x is not None and (x.shape != k.shape[:-1] or not x.is_floating_point()):
            raise ValueError(
                f"{name} has shape {shape(x)} and dtype {x.dtype}, "
                f"but must be floating point {shape(k)[:-1]} for k {shape(k)}"
            )
    if not may_read(k) or k.numel() == 0:
        return
    longest = k.detach().to(dtype).square().sum(-1).max().sqrt().item()
    if longest > 1.01:  # tolerates keys normalised in bf16; NaN passes on
        raise ValueError(
            f"k has a key of length {longest:g}, but must have at most 1: normalise the keys, as "
            "torch.nn.functional.normalize(k, dim=-1) does"
        )
    if bool(((beta < 0) | (beta > 2)).any()):
        raise ValueError(
            f"beta is from {beta.min().item():g} to {beta.max().item():g}, but must be in [0, 2]"
        )
    if log_decay is not None and bool((log_decay > 0).any()):
        raise ValueError(
            f"log_decay is up to {log_decay.max().item():g}, but must be at most 0 (a gate of at most 1)"
        )


class Rates(NamedTuple):
    """The learning rates b and, of the gated form, the logarithm of the decays a: `[...,G]` each."""

    beta: Tensor
    log_decay: Tensor | None


class DeltaNet(MultiHeadAttention[DeltaNetState, Rates]):
    """DeltaNet and Gated DeltaNet.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`;
            must be causal. Each of the G key and value heads has a state, a rate and a decay.
        gated: let the state decay, and gate the output.
        max_beta: largest rate, in (0, 2]; above 1 the state may change sign along a key.
    """

    supports = CAUSAL_ONLY.but(reads_input=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gated: bool = False,
        max_beta: float = 1.0,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_finite(max_beta=max_beta)
        if not 0 < max_beta <= 2:
            raise ValueError(f"max_beta is {max_beta}, but must be above 0 and at most 2")
        self.gated, self.max_beta = gated, max_beta
        self.beta_proj = Linear(d_model, self.n_kv_heads)
        self.norm = HeadRMSNorm(n_heads, self.value_dim)
        if gated:
            self.decay_proj = Linear(d_model, self.n_kv_heads, bias=False)
            self.gate_proj = Linear(d_model, n_heads * self.value_dim)
            # Initialised as in Mamba-2: a random pace per head, and softplus(decay_bias) from 0.001 to 0.1.
            self.log_pace = nn.Parameter(torch.empty(self.n_kv_heads).uniform_(1, 16).log())
            begin = torch.empty(self.n_kv_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.decay_bias = nn.Parameter(begin.expm1().log())

    def read_input(self, x: Tensor) -> Rates:
        """Compute the rates b and the logarithms of the decays a, `[...,G]` each."""
        dtype = accumulation_dtype(x.dtype)
        beta = self.max_beta * self.beta_proj(x).to(dtype).sigmoid()
        if not self.gated:
            return Rates(beta, None)
        pace = self.log_pace.to(dtype).exp()
        return Rates(beta, -pace * softplus(self.decay_proj(x).to(dtype) + self.decay_bias.to(dtype)))

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, gate it if configured, and project back."""
        o = self.norm(o)
        if self.gated:
            o = o * silu(self.gate_proj(x).unflatten(-1, o.shape[-2:]))
        return super().merge_heads(o, x)

    def attend(self, heads: Heads[Rates], masks: Masks) -> Tensor:
        """Run over whole sequences."""
        return self._run(heads, None, masks)[0]

    def init_state(self, batch_size: int) -> DeltaNetState:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        like, sizes = self.out_proj.weight, (self.n_kv_heads, self.head_dim, self.value_dim)
        kv = like.new_zeros(batch_size, *sizes, dtype=self.state_dtype)
        return DeltaNetState(kv, like.new_zeros(batch_size, dtype=torch.long))

    def prefill_heads(
        self, heads: Heads[Rates], state: DeltaNetState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, DeltaNetState]:
        """Run over whole sequences, from a state to a state."""
        o, kv = self._run(heads, state.kv, Masks(key_padding_mask))
        return o, DeltaNetState(kv, advance(state.position, heads.q, key_padding_mask))

    def _run(self, heads: Heads[Rates], state: Tensor | None, masks: Masks) -> tuple[Tensor, Tensor]:
        q, k, v, beta, log_decay = self._rule(heads)
        return delta_rule(q, k, v, beta, log_decay=log_decay, state=state, **masks.of_keys())

    def step_heads(self, heads: Heads[Rates], state: DeltaNetState) -> tuple[Tensor, DeltaNetState]:
        """Run one step of the recurrence."""
        q, k, v, beta, log_decay = self._rule(heads)
        o, kv = delta_rule_step(q, k, v, beta, state.kv, log_decay=log_decay)
        return o, DeltaNetState(kv, state.position + 1)

    def _rule(self, heads: Heads[Rates]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries and keys of length 1, values in the type of the sums, and gates."""
        q, k, v, positions, (beta, log_decay) = heads
        q, k = _unit(q), _unit(k)
        if positions is not None:
            q, k = rotary(q, positions), rotary(k, positions)
        return q, k, v.to(q.dtype), beta, log_decay


def _unit(x: Tensor) -> Tensor:
    """Return silu(x) scaled to length 1, or shorter where it is close to 0."""
    x = silu(x.to(accumulation_dtype(x.dtype)))
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
