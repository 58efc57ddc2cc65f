# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of the gradients of linear attention, by the phases of `triton.py`:

5. `query_gradients`, and the gradients of the divisors.
7. `key_gradients`, `value_gradients` and `gate_gradients`, from the gradients of the states.

Letters and layouts are those of `triton_kernels.py`. No two programs write to the same
memory, so every run gives the same bits.
"""

import triton
import triton.language as tl

from unrolled.ops.linear.triton_kernels import (
    LOWEST,
    cumulated_gates,
    decay_between,
    inner_products,
    inverse,
    query_chunk,
)
from unrolled.ops.triton.tiles import UNSPECIALIZED, cast, load_tile, place, product, store_tile


@triton.jit
def read_gradients(
    grad_o, o_strides, tokens, exists, kv, r,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return dO S^T [C, BR], of features r."""
    total = tl.zeros([C, BR], tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        o_tile = load_tile(grad_o, tokens, o_strides[1], exists, m, o_strides[3], m < M)
        total = product(o_tile, load_tile(kv, m, 1, m < M, r, M, r < R), total, PARTS)
    return total


@triton.jit
def decays_of_chunk(log_decay, gate_strides, row, g, tokens, exists, C: tl.constexpr):
    """Return the decays from key j to query i, 0 for j > i, and those from the state before the chunk."""
    i = tl.arange(0, C)
    within, from_start = tl.where(i[:, None] >= i[None, :], 1.0, 0.0), 1.0
    if log_decay is not None:
        b, _ = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        within = decay_between(b[:, None], b[None, :], i[:, None] >= i[None, :])
        from_start = tl.exp(b.to(tl.float32))
    return within, from_start


@triton.jit
def query_scores(
    q, q_strides, k, k_strides, grad_o, o_strides, tokens, exists, kv, k_sum,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the scores of a chunk, dO S^T of its last features, and each query's q . (dO S^T) and q . z."""
    weights = tl.zeros([C, C], tl.float32)
    read = tl.zeros([C], tl.float32)
    read_sum = tl.zeros([C], tl.float32)
    dq_read = tl.zeros([C, BR], tl.float32)
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        q_tile = load_tile(q, tokens, q_strides[1], exists, r, q_strides[3], r < R)
        dq_read = read_gradients(grad_o, o_strides, tokens, exists, kv, r, R, M, C, BR, BM, 3)
        read += tl.sum(q_tile * dq_read, 1)
        read_sum += tl.sum(q_tile * tl.load(k_sum + r, mask=r < R, other=0)[None, :], 1)
        if CAUSAL:
            k_tile = load_tile(k, r, k_strides[3], r < R, tokens, k_strides[1], exists)
            weights = product(q_tile, k_tile, weights)
    return weights, dq_read, read, read_sum


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_gradients(
    q, q_strides, k, k_strides, v, v_strides, log_decay, gate_strides,
    kv, kv_stride, k_sum, k_sum_stride, grad_o, o_strides, den, d_den, d_reads, dq,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """5. Gradients of a chunk of queries and of their divisors, and what they add to those of the gates.

    The gradient of a divisor is -(o . dO) / den, with o . dO computed from the weights and the state. A
    stored o in bf16 would save these products. But then the gradients of the states would be off by 0.3 %,
    and dq by 10 times its rounding error where the values have much in common.
    """
    head, g, row, tokens, exists, index, at = query_chunk(length, chunks, cu_seqlens, owners, G, P, C, CAUSAL)
    # With a divisor, dq is a sum over keys that nearly cancels: its product with q is 0.
    PARTS: tl.constexpr = 3 if dq.dtype.element_ty == tl.float32 else 1 if den is None else 2
    SUMS: tl.constexpr = den is not None or d_reads is not None
    q += row * q_strides[0] + head * q_strides[2]
    k += row * k_strides[0] + g * k_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    grad_o += row * o_strides[0] + head * o_strides[2]
    kv += index * kv_stride
    k_sum += index * k_sum_stride
    d_weights = tl.zeros([C, C], tl.float32)
    dq_read = tl.zeros([C, BR], tl.float32)
    if SUMS:
        weights, dq_read, read, read_sum = query_scores(
            q, q_strides, k, k_strides, grad_o, o_strides, tokens, exists, kv, k_sum,
            R, M, C, BR, BM, CAUSAL,
        )  # fmt: skip
    if CAUSAL:
        d_weights = inner_products(grad_o, o_strides, v, v_strides, tokens, exists, M, BM, C)
        within, from_start = decays_of_chunk(log_decay, gate_strides, row, g, tokens, exists, C)
        if SUMS:
            weights *= within
            read *= from_start
            read_sum *= from_start
    if den is not None:
        inverse_den = inverse(tl.load(den + at, mask=exists, other=0))
        d_weights *= inverse_den[:, None]
        read *= inverse_den
        dd = -(read + tl.sum(d_weights * weights, 1)) * inverse_den
        d_weights += dd[:, None]
        read += dd * read_sum
    if d_reads is not None:
        # Gate t scales the weight of every pair i >= t > j, and what every query i >= t reads from the state.
        pairs = d_weights * weights
        i = tl.arange(0, C)
        sent = tl.cumsum(pairs, 1) - pairs + read[:, None]
        sent = tl.sum(tl.where(i[:, None] >= i[None, :], sent, 0.0), 0)
    if CAUSAL:
        d_weights *= within
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        if R > BR or not SUMS:
            dq_read = read_gradients(grad_o, o_strides, tokens, exists, kv, r, R, M, C, BR, BM, PARTS)
        dq_tile = dq_read
        if den is not None:
            z = tl.load(k_sum + r, mask=r < R, other=0)
            dq_tile = dq_tile * inverse_den[:, None] + dd[:, None] * z[None, :]
        if CAUSAL:
            if log_decay is not None:
                dq_tile *= from_start[:, None]
            k_tile = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R)
            dq_tile = product(d_weights, k_tile, dq_tile, PARTS)
        store_tile(dq, at, R, exists, r, r < R, dq_tile)
    if den is not None:
        tl.store(d_den + at, dd, mask=exists)
    if d_reads is not None:
        tl.store(d_reads + at, sent, mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_gradients(
    q, q_strides, v, v_strides, log_decay, gate_strides, d_kv, kv_stride, d_k_sum, k_sum_stride,
    grad_o, o_strides, den, d_den, dk,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """7. Gradients of a block of key features: from the state after the chunk, and from its own queries."""
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    sequence, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    index = ((slot if CAUSAL or log_decay is not None else sequence) * G + g).to(tl.int64)
    PARTS: tl.constexpr = 3 if dk.dtype.element_ty == tl.float32 else 1
    # With a divisor, the contributions of S and z to dk cancel, except for the differences between values.
    STATE_PARTS: tl.constexpr = 3 if dk.dtype.element_ty == tl.float32 else 1 if den is None else 2
    v += row * v_strides[0] + g * v_strides[2]
    dk_tile = tl.zeros([C, BR], tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        v_tile = load_tile(v, tokens, v_strides[1], exists, m, v_strides[3], m < M)
        d_kv_tile = load_tile(d_kv + index * kv_stride, m, 1, m < M, r, M, r < R)
        dk_tile = product(v_tile, d_kv_tile, dk_tile, STATE_PARTS)
    dk_tile += tl.load(d_k_sum + index * k_sum_stride + r, mask=r < R, other=0)[None, :]
    j = tl.arange(0, C)
    allowed = j[:, None] <= j[None, :]
    if log_decay is not None:
        b, total = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        dk_tile *= tl.exp((total - b).to(tl.float32))[:, None]
    if CAUSAL:
        for p in range(P):
            head = g * P + p
            at = (row * length + tokens) * G * P + head
            o_head = grad_o + row * o_strides[0] + head * o_strides[2]
            # [key, query]
            d_weights = inner_products(v, v_strides, o_head, o_strides, tokens, exists, M, BM, C)
            if den is not None:
                d_weights *= inverse(tl.load(den + at, mask=exists, other=0))[None, :]
                d_weights += tl.load(d_den + at, mask=exists, other=0)[None, :]
            if log_decay is not None:
                d_weights *= decay_between(b[None, :], b[:, None], allowed)
            else:
                d_weights = tl.where(allowed, d_weights, 0.0)
            q_head = q + row * q_strides[0] + head * q_strides[2]
            q_tile = load_tile(q_head, tokens, q_strides[1], exists, r, q_strides[3], r < R)
            dk_tile = product(d_weights, q_tile, dk_tile, PARTS)
    store_tile(dk, (row * length + tokens) * G + g, R, exists, r, r < R, dk_tile)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def value_gradients(
    q, q_strides, k, k_strides, log_decay, gate_strides, d_kv, kv_stride, grad_o, o_strides, den, dv,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """7. Gradients of a block of values: from the state after the chunk, and from its own queries."""
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    sequence, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    index = ((slot if CAUSAL or log_decay is not None else sequence) * G + g).to(tl.int64)
    PARTS: tl.constexpr = 3 if dv.dtype.element_ty == tl.float32 else 1
    k += row * k_strides[0] + g * k_strides[2]
    dv_tile = tl.zeros([C, BM], tl.float32)
    if d_kv is not None:
        for first in range(0, R, BR):
            r = first + tl.arange(0, BR)
            k_tile = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R)
            d_kv_tile = load_tile(d_kv + index * kv_stride, r, M, r < R, m, 1, m < M)
            dv_tile = product(k_tile, d_kv_tile, dv_tile, PARTS)
    j = tl.arange(0, C)
    allowed = j[:, None] <= j[None, :]
    if log_decay is not None:
        b, total = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        dv_tile *= tl.exp((total - b).to(tl.float32))[:, None]
    if CAUSAL:
        for p in range(P):
            head = g * P + p
            q_head = q + row * q_strides[0] + head * q_strides[2]
            # [key, query]
            weights = inner_products(k, k_strides, q_head, q_strides, tokens, exists, R, BR, C)
            if log_decay is not None:
                weights *= decay_between(b[None, :], b[:, None], allowed)
            else:
                weights = tl.where(allowed, weights, 0.0)
            if den is not None:
                at = (row * length + tokens) * G * P + head
                weights *= inverse(tl.load(den + at, mask=exists, other=0))[None, :]
            o_head = grad_o + row * o_strides[0] + head * o_strides[2]
            o_tile = load_tile(o_head, tokens, o_strides[1], exists, m, o_strides[3], m < M)
            dv_tile = product(weights, o_tile, dv_tile, PARTS)
    store_tile(dv, (row * length + tokens) * G + g, M, exists, m, m < M, dv_tile)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gate_gradients(
    k, k_strides, v, v_strides, log_decay, gate_strides, states, d_states, d_reads, d_log_decay,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """7. Gradients of the log gates of a chunk: a separate sum for each path through a gate."""
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    state = (slot * G + g).to(tl.int64) * (R * M + R)
    states += state
    d_states += state
    k += row * k_strides[0] + g * k_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    given = tl.zeros([C], tl.float32)  # gradients through what each key adds to the state after the chunk
    passed = tl.zeros([BR], tl.float32)  # gradients through the state before the chunk
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        dk_given = tl.zeros([C, BR], tl.float32)
        for first_m in range(0, M, BM):
            m = first_m + tl.arange(0, BM)
            v_tile = load_tile(v, tokens, v_strides[1], exists, m, v_strides[3], m < M)
            d_kv_tile = load_tile(d_states, m, 1, m < M, r, M, r < R)
            passed += tl.sum(load_tile(states, m, 1, m < M, r, M, r < R) * d_kv_tile, 0)
            dk_given = product(v_tile, d_kv_tile, dk_given)
        dz = tl.load(d_states + R * M + r, mask=r < R, other=0)
        passed += tl.load(states + R * M + r, mask=r < R, other=0) * dz
        k_tile = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R)
        given += tl.sum(k_tile * (dk_given + dz[None, :]), 1)
    b, total = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
    given *= tl.exp((total - b).to(tl.float32))
    i = tl.arange(0, C)
    gradient = tl.sum(tl.where(i[:, None] < i[None, :], given[:, None], 0.0), 0)
    gradient += tl.sum(passed, 0) * tl.exp(total.to(tl.float32))
    if CAUSAL:
        for p in range(P):
            gradient += tl.load(d_reads + (row * length + tokens) * G * P + g * P + p, mask=exists, other=0)
    offsets = row * gate_strides[0] + tokens.to(tl.int64) * gate_strides[1] + g * gate_strides[2]
    clamped = tl.load(log_decay + offsets, mask=exists, other=0).to(tl.float64) < LOWEST
    gradient = cast(tl.where(clamped, 0.0, gradient), d_log_decay.dtype.element_ty)
    tl.store(d_log_decay + (row * length + tokens) * G + g, gradient, mask=exists)
