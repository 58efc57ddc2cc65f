# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of linear attention with a gate for every feature, by the phases of `triton.py`:

1. `weights`: the weights of the pairs within each chunk.
2. `chunk_sums` and `scan`: the states, or their gradients.
3. `outputs`.

The formulas and letters are those of `chunked.py`. The logarithms of products of gates are computed as a
product of two matrices: zeros and ones that choose the gates, and the logarithms of the gates. All terms have
one sign, so no digits are lost. The logarithm of a gate of 0 counts as -10,000, so each product with such a
gate is exactly 0.

The zeros and ones are loaded, since computing them would fill the registers: `triton_launch.Squares` explains
`chosen`, and `parted` of the gradients.

A cut at level l is in the middle of a block of 2^(l + 1) tokens. It separates each token of the right half,
as a query, from each token of the left half, as a key. One factor per token is enough: the product of the
gates between the token and the cut, F in the right half and E in the left half.
"""

import triton
import triton.language as tl

from unrolled.ops.linear.triton_kernels import LOWEST
from unrolled.ops.triton.tiles import (
    UNSPECIALIZED,
    load_tile,
    place,
    product,
    sequence_slots,
    short,
    store_tile,
)


@triton.jit
def load_gates(log_decay, strides, row, head, tokens, exists, r, R: tl.constexpr):
    """Return the logarithms of the gates [C, BR] in fp32; absent tokens have gate 1."""
    log_decay += row * strides[0] + head * strides[2]
    gates = load_tile(log_decay, tokens, strides[1], exists, r, strides[3], r < R).to(tl.float32)
    return tl.where(gates < LOWEST, LOWEST, gates)


@triton.jit
def load_square(squares, number, C: tl.constexpr):
    """Return one matrix of `chosen` or `parted`, [C, C]."""
    i = tl.arange(0, C)
    return tl.load(squares + number * C * C + i[:, None] * C + i[None, :])


@triton.jit
def in_right_half(i, level):
    """Return whether token i is in the right half of its block of 2^(level + 1) tokens."""
    return ((i >> level) & 1) == 1


@triton.jit
def decays(chosen, gates, C: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr = 3):
    """Return the products of the chosen gates, [C, BR].

    Two parts of their logarithms give 16 binary digits, enough for a factor that is rounded to 8 or 11.
    """
    return tl.exp(product(chosen, gates, tl.zeros([C, BR], tl.float32), PARTS))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weights(
    q, q_strides, k, k_strides, log_decay, gate_strides, chosen, pairs,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """1. W of a chunk and a query head, [tokens, H, C]."""
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g = head // P
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    q += row * q_strides[0] + head * q_strides[2]
    k += row * k_strides[0] + g * k_strides[2]
    # If q is bf16, the kernels that read W round it to bf16. So its factors may be rounded as well.
    GATE_PARTS: tl.constexpr = 3 if q.dtype.element_ty == tl.float32 else 2
    i = tl.arange(0, C)
    total = tl.zeros([C, C], tl.float32)
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        q_tile = load_tile(q, tokens, q_strides[1], exists, r, q_strides[3], r < R).to(tl.float32)
        k_tile = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R).to(tl.float32)
        gates = load_gates(log_decay, gate_strides, row, g, tokens, exists, r, R)
        total += tl.where(i[:, None] == i[None, :], tl.sum(q_tile * k_tile, 1)[:, None], 0.0)
        for level in tl.range(0, LEVELS, loop_unroll_factor=1):
            factor = decays(load_square(chosen, level, C), gates, C, BR, GATE_PARTS)
            zeros = tl.zeros([C, C], tl.float32)
            products = product(short(q_tile * factor, q), tl.trans(short(k_tile * factor, q)), zeros)
            cut = i >> level << level  # in the right half, keys from the left half come before it
            first_key = tl.where(in_right_half(i, level), cut - (1 << level), cut)
            chosen_keys = (i[None, :] >= first_key[:, None]) & (i[None, :] < cut[:, None])
            total += tl.where(chosen_keys, products, 0.0)
    store_tile(pairs, ((row * length + tokens) * G * P + head), C, exists, i, i < C, total)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_sums(
    x, x_strides, y, y_strides, log_decay, gate_strides, chosen, states, through,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    LEVELS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """2. What each chunk adds to the state, (K E)^T V, and the decay through the chunk, F_last [slots, G, R].

    With QUERIES, what it adds to the gradient of the state: (Q F)^T dO, over all P heads.
    """
    slot, g, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    r = block // tl.cdiv(M, BM) * BR + tl.arange(0, BR)
    m = block % tl.cdiv(M, BM) * BM + tl.arange(0, BM)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    index = (slot * G + g).to(tl.int64)
    gates = load_gates(log_decay, gate_strides, row, g, tokens, exists, r, R)
    factor = decays(load_square(chosen, LEVELS + 1 if QUERIES else LEVELS, C), gates, C, BR)
    total = tl.zeros([BR, BM], tl.float32)
    for p in range(P):
        head = g * P + p
        x_head = x + row * x_strides[0] + head * x_strides[2]
        y_head = y + row * y_strides[0] + head * y_strides[2]
        x_tile = load_tile(x_head, tokens, x_strides[1], exists, r, x_strides[3], r < R)
        y_tile = load_tile(y_head, tokens, y_strides[1], exists, m, y_strides[3], m < M)
        total = product(tl.trans(x_tile * factor), y_tile, total)
    store_tile(states + index * (R * M), r, M, r < R, m, m < M, total)
    if not QUERIES and block % tl.cdiv(M, BM) == 0:
        tl.store(through + index * R + r, tl.exp(tl.sum(gates, 0)), mask=r < R)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan(
    states, through, first, last, chunks, cu_seqlens, G,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    FROM_END: tl.constexpr,
):  # fmt: skip
    """2. s_c+1 = through_c s_c + additions_c over the chunks of a sequence, or from the last to the first.

    Each slot's additions are replaced by s_c, the state before its chunk. The sum is fp64, as in
    `ops.linear.triton_kernels.scan`.
    """
    sequence, g = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < R * M
    whole = (sequence * G + g).to(tl.int64) * (R * M) + at
    first_slot, n = sequence_slots(sequence, chunks, cu_seqlens, C)
    state = tl.load(first + whole, mask=inside, other=0).to(tl.float64)
    for i in tl.range(0, n, num_stages=STAGES):
        slot = first_slot + (n - 1 - i if FROM_END else i)
        index = (slot * G + g).to(tl.int64)
        added = tl.load(states + index * (R * M) + at, mask=inside, other=0)
        tl.store(states + index * (R * M) + at, state.to(tl.float32), mask=inside)
        state = state * tl.load(through + index * R + at // M, mask=inside, other=0) + added
    tl.store(last + whole, state.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def outputs(
    q, q_strides, v, v_strides, log_decay, gate_strides, chosen, pairs, states, o,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """3. O = W V + (Q F) S of a chunk, a query head and a block of values."""
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g, m = head // P, tl.program_id(2) * BM + tl.arange(0, BM)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    q += row * q_strides[0] + head * q_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    states += (slot * G + g).to(tl.int64) * (R * M)
    at = (row * length + tokens) * G * P + head
    i = tl.arange(0, C)
    v_tile = load_tile(v, tokens, v_strides[1], exists, m, v_strides[3], m < M)
    PARTS: tl.constexpr = 3 if o.dtype.element_ty == tl.float32 else 1
    GATE_PARTS: tl.constexpr = 3 if o.dtype.element_ty == tl.float32 else 2
    pair_tile = load_tile(pairs, at, C, exists, i, 1, i < C)
    total = product(pair_tile, v_tile, tl.zeros([C, BM], tl.float32), PARTS)
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        gates = load_gates(log_decay, gate_strides, row, g, tokens, exists, r, R)
        q_tile = load_tile(q, tokens, q_strides[1], exists, r, q_strides[3], r < R)
        state = load_tile(states, r, M, r < R, m, 1, m < M)
        q_tile *= decays(load_square(chosen, LEVELS + 1, C), gates, C, BR, GATE_PARTS)
        total = product(short(q_tile, o), short(state, o), total, PARTS)
    store_tile(o, at, M, exists, m, m < M, total)
