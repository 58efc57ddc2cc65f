# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of linear attention, by the phases of `triton.py`:

1. `chunk_sums` and 2. `scan`: the states, or their gradients.
3. `outputs`.
`step` does all of this for one token.

The formulas and letters are those of `chunked.py`. A sequence is cut into chunks of C tokens;
the chunks of all sequences are numbered consecutively as slots. The state of a slot and a key head is
stored as the R*M elements of kv, then the R of k_sum. Widths are processed in blocks, BR and BM.
"""

import torch
import triton
import triton.language as tl

from unrolled.ops.linear.chunked import LOWEST_GATE
from unrolled.ops.triton.tiles import UNSPECIALIZED, load_tile, place, product, sequence_slots, store_tile

LOWEST = tl.constexpr(LOWEST_GATE)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps)  # see `safe_divide`


@triton.jit
def query_chunk(length, chunks, cu_seqlens, owners, G, P, C: tl.constexpr, CAUSAL: tl.constexpr):
    """Return where this program's chunk of queries is.

    That is the head and its key head, the row, the tokens and which of them exist, the number of the state
    that they read, and the offsets of their divisors.
    """
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g = head // P
    sequence, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    index = ((slot if CAUSAL else sequence) * G + g).to(tl.int64)
    return head, g, row, tokens, exists, index, (row * length + tokens) * G * P + head


@triton.jit
def inner_products(
    a, a_strides, b, b_strides, tokens, exists,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return a_i . b_j for the tokens of a chunk, [C, C]."""
    products = tl.zeros([C, C], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        a_tile = load_tile(a, tokens, a_strides[1], exists, column, a_strides[3], column < WIDTH)
        b_tile = load_tile(b, column, b_strides[3], column < WIDTH, tokens, b_strides[1], exists)
        products = product(a_tile, b_tile, products)
    return products


@triton.jit
def inverse(den):
    """Return 1 / den, and 0 where den is too small; rounded to nearest, which `/` is not."""
    nothing = tl.abs(den) < TINY
    return tl.where(nothing, 0.0, tl.div_rn(1.0, tl.where(nothing, 1.0, den)))


@triton.jit
def cumulated_gates(log_decay, strides, row, head, tokens, exists):
    """Return b = cumsum(log_decay) over the chunk and its last value in fp64; absent tokens have gate 1."""
    offsets = row * strides[0] + tokens.to(tl.int64) * strides[1] + head * strides[2]
    gates = tl.load(log_decay + offsets, mask=exists, other=0).to(tl.float64)
    gates = tl.where(gates < LOWEST, LOWEST, gates)
    return tl.cumsum(gates, 0), tl.sum(gates, 0)


@triton.jit
def decay_between(b_to, b_from, allowed):
    """Return exp(b_to - b_from) where allowed, else 0; masked before exp, so that it cannot overflow.

    Each fp64 number is split into two fp32 numbers before the subtraction. Except for one more rounding, the
    result is as good as an fp64 difference rounded to fp32, and it is fast on GPUs that have few fp64 units.
    """
    to_high, from_high = b_to.to(tl.float32), b_from.to(tl.float32)
    to_low = (b_to - to_high.to(tl.float64)).to(tl.float32)
    from_low = (b_from - from_high.to(tl.float64)).to(tl.float32)
    difference = (to_high - from_high) + (to_low - from_low)
    return tl.exp(tl.where(allowed, difference, float("-inf")))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_sums(
    x, x_strides, y, y_strides, den, d_den, log_decay, gate_strides, states, through,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """1. What each chunk adds to the state: from keys (exp(b_C - b) K)^T (V, 1), and exp(b_C) in `through`.

    With QUERIES, what it adds to the gradient of the state: (exp(b) Q)^T (dO / den, dden), over all P heads.
    """
    slot, g, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    r = block // tl.cdiv(M, BM) * BR + tl.arange(0, BR)
    m = block % tl.cdiv(M, BM) * BM + tl.arange(0, BM)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    if log_decay is not None:
        b, total = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        factor = tl.exp((b if QUERIES else total - b).to(tl.float32))
        if through is not None:
            tl.store(through + slot * G + g, tl.exp(total), mask=block == 0)
    kv = tl.zeros([BR, BM], tl.float32)
    k_sum = tl.zeros([BR], tl.float32)
    for p in range(P):
        head = g * P + p
        x_tile = load_tile(
            x + row * x_strides[0] + head * x_strides[2], r, x_strides[3], r < R, tokens, x_strides[1], exists
        )
        y_tile = load_tile(
            y + row * y_strides[0] + head * y_strides[2], tokens, y_strides[1], exists, m, y_strides[3], m < M
        )
        if log_decay is not None:
            x_tile *= factor[None, :]
        if den is not None:
            at = (row * length + tokens) * G * P + head
            k_sum += tl.sum(x_tile * tl.load(d_den + at, mask=exists, other=0)[None, :], 1)
            x_tile *= inverse(tl.load(den + at, mask=exists, other=0))[None, :]
        elif not QUERIES:
            k_sum += tl.sum(x_tile.to(tl.float32), 1)
        kv = product(x_tile, y_tile, kv)
    state = states + (slot * G + g).to(tl.int64) * (R * M + R)
    store_tile(state, r, M, r < R, m, m < M, kv)
    if block % tl.cdiv(M, BM) == 0:
        tl.store(state + R * M + r, k_sum, mask=r < R)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan(
    states, through, first_kv, kv_strides, first_k_sum, k_sum_strides, last_kv, last_k_sum,
    chunks, cu_seqlens, G,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    FROM_END: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """2. s_c+1 = through_c s_c + additions_c over the chunks of a sequence, or from the last to the first.

    With KEEP, each slot's additions are replaced by s_c, the state before its chunk. The sum is fp64, so that
    its error does not grow with the number of chunks; this costs no time, as the kernel waits for memory.
    """
    sequence, g = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_kv, in_sum = at < R * M, (at >= R * M) & (at < R * M + R)
    first_slot, n = sequence_slots(sequence, chunks, cu_seqlens, C)
    state = tl.zeros([BLOCK], tl.float64)
    if first_kv is not None:
        offsets = sequence.to(tl.int64) * kv_strides[0] + g * kv_strides[1]
        offsets += (at // M).to(tl.int64) * kv_strides[2] + (at % M).to(tl.int64) * kv_strides[3]
        state += tl.load(first_kv + offsets, mask=in_kv, other=0)
    if first_k_sum is not None:
        offsets = sequence.to(tl.int64) * k_sum_strides[0] + g * k_sum_strides[1]
        state += tl.load(
            first_k_sum + offsets + (at - R * M).to(tl.int64) * k_sum_strides[2], mask=in_sum, other=0
        )
    for i in tl.range(0, n, num_stages=STAGES):
        slot = first_slot + (n - 1 - i if FROM_END else i)
        pointers = states + (slot * G + g).to(tl.int64) * (R * M + R) + at
        added = tl.load(pointers, mask=in_kv | in_sum, other=0)
        if KEEP:
            tl.store(pointers, state.to(tl.float32), mask=in_kv | in_sum)
        if through is not None:
            state *= tl.load(through + slot * G + g)
        state += added
    last = (sequence * G + g).to(tl.int64)
    state = state.to(tl.float32)
    tl.store(last_kv + last * (R * M) + at, state, mask=in_kv)
    tl.store(last_k_sum + last * R + at - R * M, state, mask=in_sum)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def outputs(
    q, q_strides, k, k_strides, v, v_strides, log_decay, gate_strides,
    kv, kv_stride, k_sum, k_sum_stride, o, den,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """3. Outputs of a chunk of queries: from the state before it and its own keys, or from the last state."""
    head, g, row, tokens, exists, index, at = query_chunk(length, chunks, cu_seqlens, owners, G, P, C, CAUSAL)
    q += row * q_strides[0] + head * q_strides[2]
    k += row * k_strides[0] + g * k_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    PARTS: tl.constexpr = 3 if o.dtype.element_ty == tl.float32 else 1
    weights = tl.zeros([C, C], tl.float32)
    divisor = tl.zeros([C], tl.float32)
    if CAUSAL or den is not None:
        for first in range(0, R, BR):
            r = first + tl.arange(0, BR)
            q_tile = load_tile(q, tokens, q_strides[1], exists, r, q_strides[3], r < R)
            z = tl.load(k_sum + index * k_sum_stride + r, mask=r < R, other=0)
            divisor += tl.sum(q_tile * z[None, :], 1)
            if CAUSAL:
                k_tile = load_tile(k, r, k_strides[3], r < R, tokens, k_strides[1], exists)
                weights = product(q_tile, k_tile, weights)
    if CAUSAL:
        i = tl.arange(0, C)
        allowed = i[:, None] >= i[None, :]
        if log_decay is not None:
            b, _ = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
            from_start = tl.exp(b.to(tl.float32))
            divisor *= from_start
            weights *= decay_between(b[:, None], b[None, :], allowed)
        else:
            weights = tl.where(allowed, weights, 0.0)
        divisor += tl.sum(weights, 1)
    for first_m in range(0, M, BM):
        m = first_m + tl.arange(0, BM)
        num = tl.zeros([C, BM], tl.float32)
        for first in range(0, R, BR):
            r = first + tl.arange(0, BR)
            q_tile = load_tile(q, tokens, q_strides[1], exists, r, q_strides[3], r < R)
            kv_tile = load_tile(kv + index * kv_stride, r, M, r < R, m, 1, m < M)
            num = product(q_tile, kv_tile, num, PARTS)
        if CAUSAL:
            if log_decay is not None:
                num *= from_start[:, None]
            v_tile = load_tile(v, tokens, v_strides[1], exists, m, v_strides[3], m < M)
            num = product(weights, v_tile, num, PARTS)
        if den is not None:
            num *= inverse(divisor)[:, None]
        store_tile(o, at, M, exists, m, m < M, num)
    if den is not None:
        tl.store(den + at, divisor, mask=exists)


@triton.jit
def step(
    q, q_strides, k, k_strides, v, v_strides, log_decay, gate_strides,
    kv, kv_strides, k_sum, k_sum_strides, o, new_kv, new_k_sum, G, P,
    R: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """One token: the new state of a key head, and what its P query heads (HEADS when padded) read from it."""
    index, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, g = index // G, index % G
    m = block * BM + tl.arange(0, BM)
    p = tl.arange(0, HEADS)
    q += row * q_strides[0] + g * P * q_strides[1]
    k += row * k_strides[0] + g * k_strides[1]
    v += row * v_strides[0] + g * v_strides[1]
    kv += row * kv_strides[0] + g * kv_strides[1]
    k_sum += row * k_sum_strides[0] + g * k_sum_strides[1]
    v_row = tl.load(v + m.to(tl.int64) * v_strides[2], mask=m < M, other=0).to(tl.float32)
    num = tl.zeros([HEADS, BM], tl.float32)
    divisor = tl.zeros([HEADS], tl.float32)
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        k_row = tl.load(k + r.to(tl.int64) * k_strides[2], mask=r < R, other=0).to(tl.float32)
        z = tl.load(k_sum + r.to(tl.int64) * k_sum_strides[2], mask=r < R, other=0)
        state = load_tile(kv, r, kv_strides[2], r < R, m, kv_strides[3], m < M)
        if log_decay is not None:
            gate = tl.exp(tl.load(log_decay + row * gate_strides[0] + g * gate_strides[1]).to(tl.float32))
            state *= gate
            z *= gate
        state += k_row[:, None] * v_row[None, :]
        z += k_row
        store_tile(new_kv + (row * G + g) * (R * M), r, M, r < R, m, m < M, state)
        if block == 0:
            tl.store(new_k_sum + (row * G + g) * R + r, z, mask=r < R)
        q_tile = load_tile(q, p, q_strides[1], p < P, r, q_strides[2], r < R)
        num = product(q_tile, state, num)
        divisor += tl.sum(q_tile * z[None, :], 1)
    if NORMALIZE:
        num *= inverse(divisor)[:, None]
    store_tile(o + (row * G + g) * P * M, p, M, p < P, m, m < M, num)
