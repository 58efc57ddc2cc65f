# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of the gradients of the delta rule, by the phases of `triton.py`:

6. `scan_back`: the gradients of the states and of N.
8. `correction_gradients` and `key_gradients`: the gradients through the triangular system.

Letters and layouts are those of `triton_kernels.py`. With X = (I + A)^-1, the right sides V' = diag(b) V and
K' = diag(b e^L) K of the system have the gradients dV' = X^T dU and dK' = X^T dW, and
dA = -(dV' U^T + dK' W^T).
"""

import triton
import triton.language as tl

from unrolled.ops.delta.triton_kernels import add_outer, load_rows, store_rows, times_rows
from unrolled.ops.linear.triton_kernels import cumulated_gates, decay_between, inner_products
from unrolled.ops.triton.tiles import (
    UNSPECIALIZED,
    cast,
    load_tile,
    place,
    place_sequence,
    product,
    sequence_slots,
    store_tile,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan_back(
    k, k_strides, w, dn, to_end, through, last, last_strides, d_states, d_first,
    length, chunks, cu_seqlens, G,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """6. From the last chunk: dN += diag(e^(L_C - L)) K dS', then dS = e^(L_C) dS' + dS'' - W^T dN.

    dS'' is what the queries of the chunk add. Before the call, `d_states` holds dS'' of each slot. After the
    call, it holds dS', the gradient of the state after the chunk.
    """
    sequence, g = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row, begin, end = place_sequence(sequence, length, cu_seqlens)
    slot, chunk_count = sequence_slots(sequence, chunks, cu_seqlens, C)
    k += row * k_strides[0] + g * k_strides[2]
    last += sequence.to(tl.int64) * last_strides[0] + g * last_strides[1]
    tiles = load_rows(last, last_strides[2], last_strides[3], m, M, R, ROWS, TILES)
    for i in range(chunk_count):
        c = chunk_count - 1 - i
        tokens = begin + c * C + tl.arange(0, C)
        exists = tokens < end
        at = (row * length + tokens) * G + g
        index = ((slot + c) * G + g).to(tl.int64)
        slot_states = d_states + index * (R * M + R)
        added = load_rows(slot_states, M, 1, m, M, R, ROWS, TILES)
        store_rows(slot_states, tiles, m, M, R, ROWS, TILES)
        zeros = tl.zeros([C, BM], tl.float32)
        dn_tile = times_rows(k, tokens, k_strides[1], exists, k_strides[3], tiles, zeros, R, ROWS, TILES)
        scale = 1.0
        if through is not None:
            scale = tl.load(through + index)
            dn_tile *= tl.load(to_end + at, mask=exists, other=0)[:, None]
        dn_tile += load_tile(dn, at, M, exists, m, 1, m < M)
        store_tile(dn, at, M, exists, m, m < M, dn_tile)
        tiles = add_outer(tiles, scale, w, 1, at, R, exists, -dn_tile, R, ROWS, TILES)
        tiles = sums_of_rows(tiles, added, TILES)
    store_rows(d_first + (sequence * G + g).to(tl.int64) * (R * M), tiles, m, M, R, ROWS, TILES)


@triton.jit
def sums_of_rows(tiles, others, TILES: tl.constexpr):
    """Return the sum of two states in tiles."""
    sums = ()
    for i in tl.static_range(TILES):
        sums = sums + (tiles[i] + others[i],)  # noqa: RUF005
    return sums


@triton.jit(do_not_specialize=UNSPECIALIZED)
def correction_gradients(
    k, k_strides, v, v_strides, beta, beta_strides, log_decay, gate_strides, u, w, dn, states, inverses,
    d_reads, dv, d_beta, length, chunks, cu_seqlens, owners, G, P,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """8. dV and db of a chunk, and what A and K' add to the gradients of its gates, in `d_reads`.

    In memory, dK' replaces W, and the gradient of K K^T replaces the inverse.
    """
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    at = (row * length + tokens) * G + g
    index = (slot * G + g).to(tl.int64)
    inverses += index * (C * C)
    states += index * (R * M + R)
    k += row * k_strides[0] + g * k_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    i = tl.arange(0, C)
    before = i[:, None] > i[None, :]
    rates = beta + row * beta_strides[0] + tokens.to(tl.int64) * beta_strides[1] + g * beta_strides[2]
    rate = tl.load(rates, mask=exists, other=0).to(tl.float32)
    transposed = load_tile(inverses, i, 1, i < C, i, C, i < C)
    d_rate = tl.zeros([C], tl.float32)
    da = tl.zeros([C, C], tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        dn_tile = load_tile(dn, at, M, exists, m, 1, m < M)
        d_right = product(transposed, dn_tile, tl.zeros([C, BM], tl.float32))
        da = product(-d_right, load_tile(u, m, 1, m < M, at, M, exists), da)
        d_rate += tl.sum(d_right * load_tile(v, tokens, v_strides[1], exists, m, v_strides[3], m < M), 1)
        store_tile(dv, at, M, exists, m, m < M, d_right * rate[:, None])
    read = tl.zeros([C], tl.float32)
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        dw_tile = tl.zeros([C, BR], tl.float32)
        for first_m in range(0, M, BM):
            m = first_m + tl.arange(0, BM)
            dn_tile = load_tile(dn, at, M, exists, m, 1, m < M)
            dw_tile = product(-dn_tile, load_tile(states, m, 1, m < M, r, M, r < R), dw_tile)
        d_right = product(transposed, dw_tile, tl.zeros([C, BR], tl.float32))
        da = product(-d_right, load_tile(w, r, 1, r < R, at, R, exists), da)
        read += tl.sum(d_right * load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R), 1)
        store_tile(w, at, R, exists, r, r < R, d_right)
    products = inner_products(k, k_strides, k, k_strides, tokens, exists, R, BR, C)
    if log_decay is not None:
        b, _ = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        da *= decay_between(b[:, None], b[None, :], before)
        read *= tl.exp(b.to(tl.float32))
    else:
        da = tl.where(before, da, 0.0)
    d_rate += read + tl.sum(da * products, 1)
    tl.store(d_beta + at, cast(d_rate, d_beta.dtype.element_ty), mask=exists)
    d_products = da * rate[:, None]
    store_tile(inverses, i, C, i < C, i, i < C, d_products)
    if log_decay is not None:
        # Gate t scales A_ij of every pair i >= t > j, and K'_i of every i >= t.
        pairs = d_products * products
        sent = tl.cumsum(pairs, 1) - pairs + (read * rate)[:, None]
        sent = tl.sum(tl.where(i[:, None] >= i[None, :], sent, 0.0), 0)
        reads = d_reads + (row * length + tokens) * G * P + g * P  # of the first query head
        tl.store(reads, tl.load(reads, mask=exists, other=0) + sent, mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_gradients(
    k, k_strides, beta, beta_strides, log_decay, gate_strides, d_right, d_products, dk_read, dk,
    length, chunks, cu_seqlens, owners, G,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """8. Gradients of a block of key features: through outputs and states (`dk_read`), A and K'."""
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    at = (row * length + tokens) * G + g
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    i = tl.arange(0, C)
    rates = beta + row * beta_strides[0] + tokens.to(tl.int64) * beta_strides[1] + g * beta_strides[2]
    rate = tl.load(rates, mask=exists, other=0).to(tl.float32)
    if log_decay is not None:
        b, _ = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        rate *= tl.exp(b.to(tl.float32))
    dk_tile = load_tile(dk_read, at, R, exists, r, 1, r < R)
    dk_tile += rate[:, None] * load_tile(d_right, at, R, exists, r, 1, r < R)
    d_products += (slot * G + g).to(tl.int64) * (C * C)
    both = load_tile(d_products, i, C, i < C, i, 1, i < C) + load_tile(d_products, i, 1, i < C, i, C, i < C)
    k_head = k + row * k_strides[0] + g * k_strides[2]
    k_tile = load_tile(k_head, tokens, k_strides[1], exists, r, k_strides[3], r < R)
    store_tile(dk, at, R, exists, r, r < R, product(both, k_tile, dk_tile))
