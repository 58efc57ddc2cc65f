r"""Linear attention in plain PyTorch, chunk by chunk: the form that runs everywhere.

The sequence is cut into chunks of C tokens. Attention is quadratic inside a chunk, and the state is passed
between chunks: time O(T (C (R+M) + R M)), and no tensor of size [T,R,M] or [T,T] is materialised. With b the
cumulative sum of the log gates of a chunk, D_ij = exp(b_i - b_j) for i >= j, and (S, z) the state before the
chunk,

    P   = (Q K^T) * D
    num = P V + exp(b) Q S               den = P 1 + exp(b) Q z               o = num / den
    S'  = exp(b_C) S + (exp(b_C - b) K)^T V                    z' = exp(b_C) z + (exp(b_C - b) K)^T 1

The backward pass recomputes the states, so that none is stored per token (arXiv 2006.16236, eq. 13-15, by
chunk). With G = dO / den and the state gradient (S*, z*) arriving from later chunks,

    dQ' = ((G V^T) * D) K + exp(b) G S^T      dden_i = -(q_i . dQ'_i) / den_i  (as q . dQ' = num . G)
    dQ  = dQ' + dden z_i                        z_i = (D K)_i + exp(b_i) z
    dK  = ((G V^T + dden 1^T) * D)^T Q + exp(b_C - b) (V S*^T + 1 z*^T)
    dV  = P^T G + exp(b_C - b) K S*

Gate t scales what the tokens before t contribute to t and to later tokens. The gradient of its logarithm is
the sum of four parts: P_ij dP_ij over pairs i >= t > j of the chunk; what the queries i >= t read from
(S, z); what the keys j < t contribute to (S', z'); and what (S, z) contributes to (S', z'). Each part is
summed separately: the shorter formula q_i . dQ_i - k_i . dK_i subtracts large, nearly equal terms and loses
precision.

Bidirectional attention is a single chunk whose queries all read S'.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.chunks import join_chunks, scan, scan_back, split_chunks, sum_heads
from unrolled.ops.precision import accumulation_dtype, exact_dtype, without_autocast

LOWEST_GATE = -1e4  # its exp is 0, like that of -inf, but its difference from itself is 0, not NaN


class Inputs(NamedTuple):
    """The inputs of linear attention; the last three may be absent."""

    q: Tensor  # [B,T,H,R]
    k: Tensor  # [B,S,G,R]
    v: Tensor  # [B,S,G,M]
    log_decay: Tensor | None  # [B,S,G]
    kv: Tensor | None  # [B,G,R,M]
    k_sum: Tensor | None  # [B,G,R]


class Token(NamedTuple):
    """The inputs of one step."""

    q: Tensor  # [B,H,R]
    k: Tensor  # [B,G,R]
    v: Tensor  # [B,G,M]
    kv: Tensor  # [B,G,R,M]
    k_sum: Tensor  # [B,G,R]
    log_decay: Tensor | None  # [B,G]


class Options(NamedTuple):
    """The options of linear attention over whole sequences."""

    cu_seqlens: Tensor | None  # int32 [N+1]; the states then have N rows
    causal: bool
    normalize: bool
    feature_map: str | None = None  # a name in ELEMENTWISE, of the map to apply to q and k


class Outputs(NamedTuple):
    """The outputs of linear attention, with the denominator that the backward pass needs."""

    o: Tensor  # [B,T,H,M]
    kv: Tensor  # [B,G,R,M], the state after the last key
    k_sum: Tensor  # [B,G,R]
    den: Tensor  # [B,T,H,1]; empty without `normalize`


class OutputGradients(NamedTuple):
    """The gradients of the first three outputs."""

    o: Tensor
    kv: Tensor
    k_sum: Tensor


class Gradients(NamedTuple):
    """The gradients of the inputs; empty for an absent `log_decay`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    kv: Tensor
    k_sum: Tensor


class Gates(NamedTuple):
    """Products of the gates of a chunk. Without gates the last three are None, meaning 1."""

    within: Tensor  # D [..., C, C]
    from_start: Tensor | None  # exp(b) [X,n,1,C,1]
    to_end: Tensor | None  # exp(b_C - b) [X,n,1,C,1]
    through: Tensor | None  # exp(b_C) [X,n,1,1,1]


class Chunks(NamedTuple):
    """Inputs cut into n chunks, in the accumulation dtype. X = B*G; P = H/G query heads share a key head."""

    q: Tensor  # [X,n,P,C,R]
    k: Tensor  # [X,n,1,C,R]
    v: Tensor  # [X,n,1,C,M]
    gates: Gates
    kv: Tensor  # [X,1,1,R,M], the state before the first chunk
    k_sum: Tensor  # [X,1,1,R,1]


def forward(inputs: Inputs, causal: bool, normalize: bool) -> Outputs:
    """Compute the outputs of sequences that are not packed; `causal` requires T = S.

    Every operation is differentiable, so higher derivatives are computed by the same code.
    """
    (B, T, _, R), (_, _, G, M) = inputs.q.shape, inputs.v.shape
    with without_autocast(inputs.q.device):
        x = _cut(inputs, causal)
        k_to_end = _times(x.k, x.gates.to_end)
        S = scan(x.kv, k_to_end.mT @ x.v, x.gates.through)
        z = scan(x.k_sum, k_to_end.sum(-2).unsqueeze(-1), x.gates.through)
        if causal:
            weights = (x.q @ x.k.mT) * x.gates.within
            q_from_start = _times(x.q, x.gates.from_start)
            num = weights @ x.v + q_from_start @ S[:, :-1]
            den = weights.sum(-1, keepdim=True) + q_from_start @ z[:, :-1] if normalize else None
        else:
            num = x.q @ S[:, -1:]
            den = x.q @ z[:, -1:] if normalize else None
        o = num if den is None else safe_divide(num, den)
        return Outputs(
            join_chunks(o, B, T, G).to(inputs.v.dtype),
            S[:, -1].reshape(B, G, R, M).clone(),  # a view would keep all n states alive
            z[:, -1].reshape(B, G, R).clone(),
            num.new_empty(0) if den is None else join_chunks(den, B, T, G),
        )


def step(token: Token, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token and the previous state."""
    q, k, v, kv, k_sum, log_decay = token
    (B, H, R), (_, G, M), dtype = q.shape, v.shape, accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        keys = k.to(dtype)
        if log_decay is not None:
            gate = log_decay.to(dtype).exp().unsqueeze(-1)
            kv, k_sum = kv * gate.unsqueeze(-1), k_sum * gate
        kv = kv + keys.unsqueeze(-1) * v.to(dtype).unsqueeze(-2)
        k_sum = k_sum + keys
        grouped = q.to(dtype).reshape(B, G, H // G, R)
        o = grouped @ kv
        if normalize:
            o = safe_divide(o, grouped @ k_sum.unsqueeze(-1))
        return o.reshape(B, H, M).to(v.dtype), kv, k_sum


def backward(grads: OutputGradients, inputs: Inputs, den: Tensor, causal: bool, normalize: bool) -> Gradients:
    """Compute the gradients of the inputs of sequences that are not packed."""
    (B, T, _, R), (_, S_len, G, M) = inputs.q.shape, inputs.v.shape
    with without_autocast(inputs.q.device):
        x = _cut(inputs, causal)
        n, C = x.q.shape[1], x.q.shape[3]
        g = split_chunks(grads.o.to(x.v.dtype), n, C, G)
        divisor = split_chunks(den, n, C, G) if normalize else None
        if divisor is not None:
            g = safe_divide(g, divisor)
        dS_end, dz_end = grads.kv.reshape(x.kv.shape), grads.k_sum.reshape(x.k_sum.shape)
        k_to_end = _times(x.k, x.gates.to_end)
        S = scan(x.kv, k_to_end.mT @ x.v, x.gates.through)
        z = scan(x.k_sum, k_to_end.sum(-2).unsqueeze(-1), x.gates.through)
        reads = _causal_reads if causal else _bidirectional_reads
        dq, dk, dv, dS, dz, d_gates = reads(x, g, divisor, S, z, dS_end, dz_end)
        # The keys are also read through the state after their chunk.
        dk_given = _times(x.v @ dS[:, 1:].mT + dz[:, 1:].mT, x.gates.to_end)
        dk = dk + dk_given
        dv = dv + k_to_end @ dS[:, 1:]

        d_log_decay = x.k.new_empty(0)
        if inputs.log_decay is not None:
            given = (x.k * dk_given).sum(-1)
            passed = (_times(S[:, :-1], x.gates.through) * dS[:, 1:]).sum((-2, -1))
            passed = passed + (_times(z[:, :-1], x.gates.through) * dz[:, 1:]).sum((-2, -1))
            d_gates = d_gates + given.cumsum(-1) - given + passed.unsqueeze(-1)
            joined = join_chunks(d_gates.unsqueeze(-1), B, S_len, G).squeeze(-1).to(inputs.log_decay.dtype)
            d_log_decay = joined.masked_fill(inputs.log_decay < LOWEST_GATE, 0)
        return Gradients(
            join_chunks(dq, B, T, G).to(inputs.q.dtype),
            join_chunks(dk, B, S_len, G).to(inputs.k.dtype),
            join_chunks(dv, B, S_len, G).to(inputs.v.dtype),
            d_log_decay,
            dS[:, 0].reshape(B, G, R, M).clone(),
            dz[:, 0].reshape(B, G, R).clone(),
        )


# Gradients through what queries read: of queries, keys and values of their chunk, of all states S
# `[X,n+1,1,R,M]` and z `[X,n+1,1,R,1]`, and of the gates `[X,n,1,C]` except through the states.
Reads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _causal_reads(
    x: Chunks, g: Tensor, divisor: Tensor | None, S: Tensor, z: Tensor, dS_end: Tensor, dz_end: Tensor
) -> Reads:
    """Gradients where a query reads the keys of its chunk up to itself, and the state before the chunk."""
    scores = x.q @ x.k.mT
    d_weights = (g @ x.v.mT) * x.gates.within
    dq_read = _times(g @ S[:, :-1].mT, x.gates.from_start)
    dq = d_weights @ x.k + dq_read
    q_from_start = _times(x.q, x.gates.from_start)
    dz_read = torch.zeros_like(z[:, 1:])
    if divisor is not None:
        dden = -safe_divide((x.q * dq).sum(-1, keepdim=True), divisor)
        z_read = dden * _times(z[:, :-1].mT, x.gates.from_start)
        dq, dq_read = dq + dden * (x.gates.within @ x.k) + z_read, dq_read + z_read
        dz_read = sum_heads(q_from_start.mT @ dden)
        d_weights = d_weights + dden * x.gates.within
    d_gates = x.k.new_zeros(x.k.shape[:-1])
    if x.gates.through is not None:
        pairs = sum_heads(d_weights * scores)
        read = sum_heads((x.q * dq_read).sum(-1, keepdim=True)).squeeze(-1)
        d_gates = (pairs.cumsum(-1) - pairs).tril().sum(-2) + read.flip(-1).cumsum(-1).flip(-1)
    return (
        dq,
        sum_heads(d_weights.mT @ x.q),
        sum_heads((scores * x.gates.within).mT @ g),
        scan_back(dS_end, sum_heads(q_from_start.mT @ g), x.gates.through),
        scan_back(dz_end, dz_read, x.gates.through),
        d_gates,
    )


def _bidirectional_reads(
    x: Chunks, g: Tensor, divisor: Tensor | None, S: Tensor, z: Tensor, dS_end: Tensor, dz_end: Tensor
) -> Reads:
    """Gradients where all queries read the state after the only chunk."""
    dq = g @ S[:, 1:].mT
    dS_end = dS_end + sum_heads(x.q.mT @ g)
    if divisor is not None:
        dden = -safe_divide((x.q * dq).sum(-1, keepdim=True), divisor)
        dq = dq + dden * z[:, 1:].mT
        dz_end = dz_end + sum_heads(x.q.mT @ dden)
    return (
        dq,
        torch.zeros_like(x.k),
        torch.zeros_like(x.v),
        scan_back(dS_end, torch.zeros_like(x.kv), x.gates.through),
        scan_back(dz_end, torch.zeros_like(x.k_sum), x.gates.through),
        x.k.new_zeros(x.k.shape[:-1]),
    )


def safe_divide(num: Tensor, den: Tensor) -> Tensor:
    """num / den, or 0 with zero gradient where den is 0 or too small to divide by.

    The backward pass also divides by den, and its numerators may be of any size, unlike num. To keep the
    gradient finite, den must exceed the smallest normal number by a factor of 1 / eps (1e-31 in fp32).
    """
    kind = torch.finfo(den.dtype)
    nothing = den.abs() < kind.tiny / kind.eps
    return (num / den.masked_fill(nothing, 1)).masked_fill(nothing, 0)


def decay_between(b_to: Tensor, b_from: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(b_to_i - b_from_j) where `allowed [i,j]`, else 0; masked first, so exp cannot overflow."""
    difference = b_to.unsqueeze(-1) - b_from.unsqueeze(-2)
    return difference.masked_fill(~allowed, -math.inf).to(dtype).exp()


def _cut(inputs: Inputs, causal: bool) -> Chunks:
    q, k, v, log_decay, kv, k_sum = inputs
    (B, T, _, R), (_, S_len, G, M) = q.shape, v.shape
    # Wider values get longer chunks, which keeps the n states about as small as the keys. T is split evenly.
    longest = 64 if M <= 64 else 128
    n = max(1, math.ceil(T / longest)) if causal else 1
    C, key_C = math.ceil(T / n), math.ceil(S_len / n)
    dtype = accumulation_dtype(q.dtype)
    within = q.new_ones(C, key_C, dtype=dtype).tril() if causal else q.new_empty(0, dtype=dtype)
    gates = Gates(within, None, None, None)
    if log_decay is not None:
        exact = log_decay.clamp(min=LOWEST_GATE).to(exact_dtype(q.device)).unsqueeze(-1)
        b = split_chunks(exact, n, key_C, G).squeeze(-1).cumsum(-1)
        total = b[..., -1:] if key_C else b.new_zeros(*b.shape[:-1], 1)
        if causal:
            within = decay_between(b, b, within.bool(), dtype)
        gates = Gates(
            within,
            b.exp().to(dtype).unsqueeze(-1),
            (total - b).exp().to(dtype).unsqueeze(-1),
            total.exp().to(dtype).unsqueeze(-1),
        )
    return Chunks(
        split_chunks(q.to(dtype), n, C, G),
        split_chunks(k.to(dtype), n, key_C, G),
        split_chunks(v.to(dtype), n, key_C, G),
        gates,
        q.new_zeros(B * G, 1, 1, R, M, dtype=dtype) if kv is None else kv.reshape(B * G, 1, 1, R, M),
        q.new_zeros(B * G, 1, 1, R, 1, dtype=dtype) if k_sum is None else k_sum.reshape(B * G, 1, 1, R, 1),
    )


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
