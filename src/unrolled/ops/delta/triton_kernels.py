# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of the delta rule, beside those of linear attention, by the phases of `triton.py`:

1. `inverses`: X = (I + A)^-1 of each chunk, where A is the strictly lower triangle of its system.
2. `corrections`: U and W, the solutions of the systems.
3. `scan`: the states, and N = U - W S of each chunk.

The formulas and letters are those of `chunked.py`; R and M are the widths of keys and values. Layouts are
those of `ops.linear.triton_kernels`. No two programs write to the same memory.
"""

import triton
import triton.language as tl

from unrolled.ops.linear.triton_kernels import cumulated_gates, decay_between
from unrolled.ops.triton.tiles import (
    UNSPECIALIZED,
    load_tile,
    place,
    place_chunk,
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


@triton.jit
def inverse_row(a, x, ROW: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr):
    """Return row i = ROW of the inverse X of a unit lower triangular matrix, in blocks of S tokens.

    `a` is row i of the strictly lower triangle, and `x` holds the rows of X above, one after the other:

        X_ii = (I + a_ii)^-1        X_ij = -X_ii sum_n a_in X_nj, over j <= n < i
    """
    on_diagonal = inverse_of_unit_lower(a[ROW], S, LEVELS)
    blocks = ()
    for j in tl.static_range(ROW):
        total = tl.zeros([S, S], tl.float32)
        for n in tl.static_range(j, ROW):
            total = product(a[n], x[n * (n + 1) // 2 + j], total)
        blocks = blocks + (-product(on_diagonal, total, tl.zeros([S, S], tl.float32)),)  # noqa: RUF005
    return blocks + (on_diagonal,)  # noqa: RUF005


@triton.jit(do_not_specialize=UNSPECIALIZED)
def inverses(
    k, k_strides, beta, beta_strides, log_decay, gate_strides, x, length, chunks, cu_seqlens, owners, G,
    R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """1. X = (I + A)^-1 of a chunk, in blocks of S tokens: one warp computes the products of such blocks."""
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, begin, end = place_chunk(slot, length, chunks, cu_seqlens, owners, C)
    k += row * k_strides[0] + g * k_strides[2]
    beta += row * beta_strides[0] + g * beta_strides[2]
    x += (slot * G + g).to(tl.int64) * (C * C)
    N: tl.constexpr = C // S
    i = tl.arange(0, S)
    total = tl.zeros([], tl.float64)
    gates = ()  # L of each block
    found = ()
    for to in tl.static_range(N):
        tokens = begin + to * S + i
        exists = tokens < end
        rate = tl.load(beta + tokens.to(tl.int64) * beta_strides[1], mask=exists, other=0).to(tl.float32)
        if log_decay is not None:
            b, sum = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
            gates = gates + (total + b,)  # noqa: RUF005
            total += sum
        a = ()
        for block in tl.static_range(to + 1):
            earlier = begin + block * S + i
            products = tl.zeros([S, S], tl.float32)
            for first in range(0, R, BR):
                r = first + tl.arange(0, BR)
                k_rows = load_tile(k, tokens, k_strides[1], exists, r, k_strides[3], r < R)
                k_columns = load_tile(k, r, k_strides[3], r < R, earlier, k_strides[1], earlier < end)
                products = product(k_rows, k_columns, products)
            products *= rate[:, None]
            before = tokens[:, None] > earlier[None, :]
            if log_decay is not None:
                products *= decay_between(gates[to][:, None], gates[block][None, :], before)
            else:
                products = tl.where(before, products, 0.0)
            a = a + (products,)  # noqa: RUF005
        x_row = inverse_row(a, found, to, S, LEVELS)
        found = found + x_row
        for block in tl.static_range(N):
            tile = x_row[block] if block <= to else tl.zeros([S, S], tl.float32)
            store_tile(x, to * S + i, C, i < S, block * S + i, i < S, tile)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def corrections(
    k, k_strides, v, v_strides, beta, beta_strides, log_decay, gate_strides, x, u, w, to_end, through,
    length, chunks, cu_seqlens, owners, G,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """2. [U, W] = X diag(b) [V, diag(e^L) K] of a chunk; with gates, also e^(L_C - L) and e^(L_C)."""
    slot, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    at = (row * length + tokens) * G + g
    index = (slot * G + g).to(tl.int64)
    k += row * k_strides[0] + g * k_strides[2]
    v += row * v_strides[0] + g * v_strides[2]
    i = tl.arange(0, C)
    rates = beta + row * beta_strides[0] + tokens.to(tl.int64) * beta_strides[1] + g * beta_strides[2]
    rate = tl.load(rates, mask=exists, other=0).to(tl.float32)
    key_rate = rate
    if log_decay is not None:
        b, total = cumulated_gates(log_decay, gate_strides, row, g, tokens, exists)
        key_rate = rate * tl.exp(b.to(tl.float32))
        tl.store(to_end + at, tl.exp((total - b).to(tl.float32)), mask=exists)
        tl.store(through + index, tl.exp(total.to(tl.float32)))
    inverse = load_tile(x + index * (C * C), i, C, i < C, i, 1, i < C)
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
    """3. From chunk to chunk: N = U - W S, and S' = e^(L_C) S + (diag(e^(L_C - L)) K)^T N, by columns of S.

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
