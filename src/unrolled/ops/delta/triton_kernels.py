# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of the delta rule, beside those of linear attention, by the phases of `triton.py`:

1. `corrections`: U and W of each chunk, by the inverse of its triangular system.
2. `scan`: the states, and N = U - W S of each chunk.

The formulas and letters are those of `chunked.py`; R and M are the widths of keys and values. Layouts are
those of `ops.linear.triton_kernels`. No two programs write to the same memory.
"""

import triton
import triton.language as tl

from unrolled.ops.linear.triton_kernels import cumulated_gates, decay_between, inner_products
from unrolled.ops.triton.tiles import (
    UNSPECIALIZED,
    load_tile,
    place,
    place_sequence,
    product,
    sequence_slots,
    store_tile,
)


@triton.jit
def inverse_of_unit_lower(a, C: tl.constexpr, LEVELS: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular a, by halves, in 2 log2(C) - 2 products.

    Let X be the inverses of the blocks of s tokens, and a' the part of a between the two halves of each block
    of 2 s tokens. The inverses of the larger blocks are then X - X a' X.
    """
    i = tl.arange(0, C)
    lower = ((i[:, None] ^ i[None, :]) == 1) & (i[:, None] > i[None, :])
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(lower, a, 0.0)  # of blocks of 2 tokens
    for level in range(1, LEVELS):
        halves = ((i[:, None] >> level) ^ (i[None, :] >> level)) == 1
        between = tl.where(halves & (i[:, None] > i[None, :]), a, 0.0)
        x -= product(x, product(between, x, tl.zeros([C, C], tl.float32)), tl.zeros([C, C], tl.float32))
    return x


@triton.jit(do_not_specialize=UNSPECIALIZED)
def corrections(
    k, k_strides, v, v_strides, beta, beta_strides, log_decay, gate_strides, u, w, inverses, to_end, through,
    length, chunks, cu_seqlens, owners, G,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """1. [U, W] = (I + A)^-1 diag(b) [V, diag(e^L) K] of a chunk, and the inverse if it is asked for.

    With gates, also e^(L_C - L) and e^(L_C), for `scan`.
    """
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    at = (row * length + tokens) * G + g
    index = (slot * G + g).to(tl.int64)
    k += row * k_strides[0] + g * k_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    i = tl.arange(0, C)
    before = i[:, None] > i[None, :]
    rates = beta + row * beta_strides[0] + tokens.to(tl.int64) * beta_strides[1] + g * beta_strides[2]
    rate = tl.load(rates, mask=exists, other=0).to(tl.float32)
    a = inner_products(k, k_strides, k, k_strides, tokens, exists, R, BR, C) * rate[:, None]
    key_rate = rate
    if log_decay is not None:
        b, total = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        a *= decay_between(b[:, None], b[None, :], before)
        key_rate = rate * tl.exp(b.to(tl.float32))
        tl.store(to_end + at, tl.exp((total - b).to(tl.float32)), mask=exists)
        tl.store(through + index, tl.exp(total.to(tl.float32)))
    else:
        a = tl.where(before, a, 0.0)
    inverse = inverse_of_unit_lower(a, C, LEVELS)
    if inverses is not None:
        store_tile(inverses + index * (C * C), i, C, i < C, i, i < C, inverse)
    of_values = inverse * rate[None, :]
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        v_tile = load_tile(v, tokens, v_strides[1], exists, m, v_strides[3], m < M)
        store_tile(u, at, M, exists, m, m < M, product(of_values, v_tile, tl.zeros([C, BM], tl.float32)))
    of_keys = inverse * key_rate[None, :]
    for first in range(0, R, BR):
        r = first + tl.arange(0, BR)
        k_tile = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R)
        store_tile(w, at, R, exists, r, r < R, product(of_keys, k_tile, tl.zeros([C, BR], tl.float32)))


@triton.jit
def load_rows(x, row_stride, column_stride, m, M, R: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Return columns m of a state [R, M] as tiles of ROWS rows."""
    tiles = ()
    for i in tl.static_range(TILES):
        r = i * ROWS + tl.arange(0, ROWS)
        tiles = tiles + (load_tile(x, r, row_stride, r < R, m, column_stride, m < M),)  # noqa: RUF005
    return tiles


@triton.jit
def store_rows(x, tiles, m, M, R: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Store the columns m of a contiguous state [R, M]."""
    for i in tl.static_range(TILES):
        r = i * ROWS + tl.arange(0, ROWS)
        store_tile(x, r, M, r < R, m, m < M, tiles[i])


@triton.jit
def times_rows(
    x, rows, row_stride, row_exists, column_stride, tiles, total,
    R: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return total + x[rows] @ the tiles of a state."""
    for i in tl.static_range(TILES):
        r = i * ROWS + tl.arange(0, ROWS)
        total = product(load_tile(x, rows, row_stride, row_exists, r, column_stride, r < R), tiles[i], total)
    return total


@triton.jit
def add_outer(
    tiles, scale, x, column_stride, columns, row_stride, row_exists, y,
    R: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the tiles of scale S + x[columns]^T @ y."""
    added = ()
    for i in tl.static_range(TILES):
        r = i * ROWS + tl.arange(0, ROWS)
        x_tile = load_tile(x, r, column_stride, r < R, columns, row_stride, row_exists)
        added = added + (product(x_tile, y, tiles[i] * scale),)  # noqa: RUF005
    return added


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan(
    k, k_strides, w, u, n, to_end, through, first, first_strides, states, last,
    length, chunks, cu_seqlens, G,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """2. From chunk to chunk: N = U - W S, and S' = e^(L_C) S + (diag(e^(L_C - L)) K)^T N, by columns of S.

    Each slot keeps S, the state before its chunk, in the first R*M elements of R*M + R.
    """
    sequence, g = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row, begin, end = place_sequence(sequence, length, cu_seqlens)
    slot, chunk_count = sequence_slots(sequence, chunks, cu_seqlens, C)
    k += row * k_strides[0] + g * k_strides[2]
    first += sequence.to(tl.int64) * first_strides[0] + g * first_strides[1]
    tiles = load_rows(first, first_strides[2], first_strides[3], m, M, R, ROWS, TILES)
    for c in range(chunk_count):
        tokens = begin + c * C + tl.arange(0, C)
        exists = tokens < end
        at = (row * length + tokens) * G + g
        index = ((slot + c) * G + g).to(tl.int64)
        store_rows(states + index * (R * M + R), tiles, m, M, R, ROWS, TILES)
        read = times_rows(w, at, R, exists, 1, tiles, tl.zeros([C, BM], tl.float32), R, ROWS, TILES)
        n_tile = load_tile(u, at, M, exists, m, 1, m < M) - read
        store_tile(n, at, M, exists, m, m < M, n_tile)
        scale = 1.0
        if through is not None:
            scale = tl.load(through + index)
            n_tile *= tl.load(to_end + at, mask=exists, other=0)[:, None]
        tiles = add_outer(tiles, scale, k, k_strides[3], tokens, k_strides[1], exists, n_tile, R, ROWS, TILES)
    store_rows(last + (sequence * G + g).to(tl.int64) * (R * M), tiles, m, M, R, ROWS, TILES)
