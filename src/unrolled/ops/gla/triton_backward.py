# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of gradients of linear attention with a gate for every feature, by phases of `triton.py`:

5. `weight_gradients` and `value_gradients`.
6. `feature_gradients`, of queries, keys and gates.

Letters and layouts are those of `triton_kernels.py`. No two programs write to the same memory.
"""

import triton
import triton.language as tl

from unrolled.ops.gla.triton_kernels import decays, in_right_half, load_gates, load_square
from unrolled.ops.triton.tiles import UNSPECIALIZED, load_tile, place, product, short, store_tile


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weight_gradients(
    v, v_strides, grad_o, o_strides, d_pairs, length, chunks, cu_seqlens, owners, G, P,
    M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """5. dW = dO V^T of a chunk and a query head, [tokens, H, C], for pairs of tokens in both orders."""
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    v += row * v_strides[0] + head // P * v_strides[2]
    grad_o += row * o_strides[0] + head * o_strides[2]
    total = tl.zeros([C, C], tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        o_tile = load_tile(grad_o, tokens, o_strides[1], exists, m, o_strides[3], m < M)
        total = product(o_tile, load_tile(v, m, v_strides[3], m < M, tokens, v_strides[1], exists), total)
    i = tl.arange(0, C)
    total = tl.where(i[:, None] >= i[None, :], total, tl.trans(total))
    store_tile(d_pairs, (row * length + tokens) * G * P + head, C, exists, i, i < C, total)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def value_gradients(
    k, k_strides, grad_o, o_strides, log_decay, gate_strides, chosen, pairs, d_states, dv,
    length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """5. dV = W^T dO + (K E) dS' of a chunk, a key head and a block of values."""
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    k += row * k_strides[0] + g * k_strides[2]
    d_states += (slot * G + g).to(tl.int64) * (R * M)
    PARTS: tl.constexpr = 3 if dv.dtype.element_ty == tl.float32 else 1
    GATE_PARTS: tl.constexpr = 3 if dv.dtype.element_ty == tl.float32 else 2
    i = tl.arange(0, C)
    total = tl.zeros([C, BM], tl.float32)
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        gates = load_gates(log_decay, gate_strides, row, g, tokens, exists, r, R)
        k_tile = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R)
        d_state = load_tile(d_states, r, M, r < R, m, 1, m < M)
        k_tile *= decays(load_square(chosen, LEVELS, C), gates, C, BR, GATE_PARTS)
        total = product(short(k_tile, dv), short(d_state, dv), total, PARTS)
    for p in range(P):
        head = g * P + p
        o_head = grad_o + row * o_strides[0] + head * o_strides[2]
        o_tile = load_tile(o_head, tokens, o_strides[1], exists, m, o_strides[3], m < M)
        at = (row * length + tokens) * G * P + head
        total = product(load_tile(pairs, i, 1, i < C, at, C, exists), o_tile, total, PARTS)
    store_tile(dv, (row * length + tokens) * G + g, M, exists, m, m < M, total)


@triton.jit
def read_from_states(
    x, x_strides, tokens, exists, states, r, like, R: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Return x S^T for x [C, M] and features r, as exact as the type of `like`."""
    PARTS: tl.constexpr = 3 if like.dtype.element_ty == tl.float32 else 1
    total = tl.zeros([C, BR], tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        x_tile = load_tile(x, tokens, x_strides[1], exists, m, x_strides[3], m < M)
        state = load_tile(states, m, 1, m < M, r, M, r < R)
        total = product(x_tile, short(state, like), total, PARTS)
    return total


@triton.jit
def keep(bits, x):
    """Return x where all bits are set, and 0 where none is."""
    if x.dtype == tl.float32:
        kept = (x.to(tl.int32, bitcast=True) & bits.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        kept = (x.to(tl.int16, bitcast=True) & bits).to(x.dtype, bitcast=True)
    return kept


@triton.jit(do_not_specialize=UNSPECIALIZED)
def feature_gradients(
    q, q_strides, k, k_strides, v, v_strides, grad_o, o_strides, log_decay, gate_strides,
    chosen, parted, d_pairs, states, d_states, dq, dk, d_log_decay, length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """6. Gradients of a chunk of queries, keys and gates, for a key head and a block of features.

    At each cut, the queries of the right halves and the keys of the left halves are the rows x of one matrix
    with one factor f each. Their gradients are dx = f S (f x), where S is dW of the separated pairs in both
    orders. The gradient of the logarithm of f, x dx, is added to the gradients of the gates that f has.
    """
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    index = (slot * G + g).to(tl.int64) * (R * M)
    k += row * k_strides[0] + g * k_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    like = d_log_decay if d_log_decay.dtype.element_ty == tl.float32 else dq  # the more exact of the results
    PARTS: tl.constexpr = 3 if like.dtype.element_ty == tl.float32 else 1
    GATE_PARTS: tl.constexpr = 3 if like.dtype.element_ty == tl.float32 else 2
    i = tl.arange(0, C)
    gates = load_gates(log_decay, gate_strides, row, g, tokens, exists, r, R)
    k_tile = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R)
    passed = tl.zeros([BR], tl.float32)  # the gradient of F_last, the decay of the state through the chunk
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        state = load_tile(states + index, r, M, r < R, m, 1, m < M)
        passed += tl.sum(state * load_tile(d_states + index, r, M, r < R, m, 1, m < M), 1)
    dk_tile = read_from_states(v, v_strides, tokens, exists, d_states + index, r, like, R, M, C, BR, BM)
    dk_tile *= decays(load_square(chosen, LEVELS, C), gates, C, BR, GATE_PARTS)
    d_gates = tl.zeros([C, BR], tl.float32) + (passed * tl.exp(tl.sum(gates, 0)))[None, :]
    d_gates = product(tl.trans(load_square(chosen, LEVELS, C)), k_tile * dk_tile, d_gates, GATE_PARTS)
    for p in range(P):
        head = g * P + p
        q_head = q + row * q_strides[0] + head * q_strides[2]
        o_head = grad_o + row * o_strides[0] + head * o_strides[2]
        at = (row * length + tokens) * G * P + head
        q_tile = load_tile(q_head, tokens, q_strides[1], exists, r, q_strides[3], r < R)
        before = states + index
        dq_tile = read_from_states(o_head, o_strides, tokens, exists, before, r, like, R, M, C, BR, BM)
        dq_tile *= decays(load_square(chosen, LEVELS + 1, C), gates, C, BR, GATE_PARTS)
        d_gates = product(tl.trans(load_square(chosen, LEVELS + 1, C)), q_tile * dq_tile, d_gates, GATE_PARTS)
        itself = tl.load(d_pairs + at * C + i, mask=exists, other=0)[:, None]
        dq_tile += itself * k_tile
        dk_tile += itself * q_tile
        pairs = short(load_tile(d_pairs, at, C, exists, i, 1, i < C), like)
        for level in tl.range(0, LEVELS, loop_unroll_factor=1):
            right = in_right_half(i, level)[:, None]
            factor = decays(load_square(chosen, level, C), gates, C, BR, GATE_PARTS)
            x_tile = tl.where(right, q_tile, k_tile).to(tl.float32)
            cut = keep(load_square(parted, level, C), pairs)
            dx_tile = product(cut, short(x_tile * factor, like), tl.zeros([C, BR], tl.float32), PARTS)
            dx_tile *= factor
            d_gates = product(tl.trans(load_square(chosen, level, C)), x_tile * dx_tile, d_gates, GATE_PARTS)
            dq_tile += tl.where(right, dx_tile, 0.0)
            dk_tile += tl.where(right, 0.0, dx_tile)
        store_tile(dq, at, R, exists, r, r < R, dq_tile)
    at = (row * length + tokens) * G + g
    store_tile(dk, at, R, exists, r, r < R, dk_tile)
    store_tile(d_log_decay, at, R, exists, r, r < R, d_gates)
