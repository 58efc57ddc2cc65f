// C = A B or C += A B for small matrices in the cache: the inner loop of attention over whole sequences.
//
// 1. A tile of C, a few rows by a few vectors, is kept in registers. For each element of the depth it takes
//    a row of B and a column of A: 24 multiply-adds for 4 loads and 6 broadcasts on AVX-512.
// 2. The tile is chosen from templates by the rows and vectors that are left at the edges.
// 3. Larger products are cut into tiles.
#pragma once

#include "prefetch.h"

namespace UNROLLED_ISA {

// Rows and vectors of the tile: 24 of the 32 registers of AVX-512 and NEON, 12 of the 16 of AVX2, 8 of the 16
// of SSE. The others hold a row of B and an element of A.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 6, TILE_VECS = 4;
#elif defined(__AVX__)
constexpr int TILE_ROWS = 6, TILE_VECS = 2;
#else
constexpr int TILE_ROWS = 4, TILE_VECS = 2;
#endif

// A matrix whose element (i, j) is `data[i * row + j * col]`.
struct Strided {
    const float* data;
    int64_t row, col;
};

// A matrix with contiguous rows, `row` floats apart, that are readable in whole vectors.
struct Rows {
    float* data;
    int64_t row;
};

inline float* row(Rows x, int64_t i) { return x.data + i * x.row; }

// 1. A tile of C in registers.
template <int ROWS, int VECS>
struct Tile {
    Vec sums[ROWS][VECS] = {};

    // Inlined by force: a call would pass the tile through memory.
    __attribute__((always_inline)) void add_product(Strided a, const float* b, int64_t b_row, int64_t depth) {
        for (int64_t k = 0; k < depth; ++k) {
            Vec right[VECS];
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j) right[j] = load(b + k * b_row + j * WIDTH);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                const Vec left = broadcast(a.data[i * a.row + k * a.col]);
#pragma GCC unroll 8
                for (int j = 0; j < VECS; ++j) sums[i][j] += left * right[j];
            }
        }
    }

    // The same for row i of C and the depths from `ends[0]` to `ends[i]`; no end is below the one before it.
    __attribute__((always_inline)) void add_rest_of_product(Strided a, const float* b, int64_t b_row,
                                                            const int64_t* ends) {
        for (int64_t k = ends[0]; k < ends[ROWS - 1]; ++k)
#pragma GCC unroll 8
            for (int i = 1; i < ROWS; ++i)
                if (k < ends[i]) {
                    const Vec left = broadcast(a.data[i * a.row + k * a.col]);
#pragma GCC unroll 8
                    for (int j = 0; j < VECS; ++j) sums[i][j] += left * load(b + k * b_row + j * WIDTH);
                }
    }

    void scale_rows(const float* factors) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j) sums[i][j] *= broadcast(factors[i]);
    }

    void write(float* c, int64_t c_row) const {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j) store(c + i * c_row + j * WIDTH, sums[i][j]);
    }

    // C = factor D + tile. C may be D.
    void write_sum(float factor, const float* d, int64_t d_row, float* c, int64_t c_row) const {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j)
                store(c + i * c_row + j * WIDTH,
                      broadcast(factor) * load(d + i * d_row + j * WIDTH) + sums[i][j]);
    }

    // C_i += factor_i D_i for the rows i of D.
    void add_scaled_rows(const float* d, int64_t d_row, const float* factors) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j)
                sums[i][j] += load(d + i * d_row + j * WIDTH) * broadcast(factors[i]);
    }

    // The same for the columns.
    void add_scaled_cols(const float* d, int64_t d_row, const float* factors) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j)
                sums[i][j] += load(d + i * d_row + j * WIDTH) * load(factors + j * WIDTH);
    }

    void subtract_from(float* c, int64_t c_row) const {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j) {
                float* out = c + i * c_row + j * WIDTH;
                store(out, load(out) - sums[i][j]);
            }
    }
};

// 2. The tile of the right size.
template <int ROWS, typename F>
inline void with_tile_of(int64_t vecs, F&& f) {
    if (vecs == 1) return f(Tile<ROWS, 1>());
    if (TILE_VECS == 2 || vecs == 2) return f(Tile<ROWS, 2>());
    if constexpr (TILE_VECS == 4) {
        if (vecs == 3) return f(Tile<ROWS, 3>());
        return f(Tile<ROWS, 4>());
    }
}

// Calls `f` with an empty tile of `rows` (at most TILE_ROWS) by as many vectors as cover `cols` (at most
// TILE_VECS).
template <typename F>
inline void with_tile(int64_t rows, int64_t cols, F&& f) {
    const int64_t vecs = (cols + WIDTH - 1) / WIDTH;
    if (rows == 1) return with_tile_of<1>(vecs, f);
    if (rows == 2) return with_tile_of<2>(vecs, f);
    if (rows == 3) return with_tile_of<3>(vecs, f);
    if (TILE_ROWS == 4 || rows == 4) return with_tile_of<4>(vecs, f);
    if constexpr (TILE_ROWS == 6) {
        if (rows == 5) return with_tile_of<5>(vecs, f);
        return with_tile_of<6>(vecs, f);
    }
}

// A number of rows that the compiler knows.
template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls `f(Count<rows>())` for 1 to TILE_ROWS rows.
template <typename F>
inline void with_rows(int64_t rows, F&& f) {
    if (rows == 1) return f(Count<1>());
    if (rows == 2) return f(Count<2>());
    if (rows == 3) return f(Count<3>());
    if (TILE_ROWS == 4 || rows == 4) return f(Count<4>());
    if constexpr (TILE_ROWS == 6) {
        if (rows == 5) return f(Count<5>());
        return f(Count<6>());
    }
}

// 3. C = A B, or C += A B if `add`, for A [rows, depth] of at most TILE_ROWS rows and B [depth, cols].
inline void multiply_few_rows(int64_t rows, int64_t cols, int64_t depth, Strided a, Rows b, Rows c,
                              bool add) {
    for (int64_t j = 0; j < cols; j += TILE_VECS * WIDTH)
        // Inlined by force, as above.
        with_tile(rows, cols - j, [&](auto tile) __attribute__((always_inline)) {
            tile.add_product(a, b.data + j, b.row, depth);
            if (add) tile.write_sum(1, c.data + j, c.row, c.data + j, c.row);
            else tile.write(c.data + j, c.row);
        });
}

// C = A B for any number of rows.
inline void multiply(int64_t rows, int64_t cols, int64_t depth, Strided a, Rows b, Rows c,
                     Prefetcher& prefetcher) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS) {
        prefetcher.issue();
        const int64_t n = rows - i < TILE_ROWS ? rows - i : TILE_ROWS;
        multiply_few_rows(n, cols, depth, {a.data + i * a.row, a.row, a.col}, b, {row(c, i), c.row}, false);
    }
}

// C = factor D + A B, where C may be D. The sum over `depth` is complete before it is added, so that the
// state of a long sequence is rounded once per chunk and not once per token.
inline void multiply_onto(float factor, Rows d, int64_t rows, int64_t cols, int64_t depth, Strided a, Rows b,
                          Rows c, Prefetcher& prefetcher) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS) {
        prefetcher.issue();
        for (int64_t j = 0; j < cols; j += TILE_VECS * WIDTH)
            with_tile(rows - i < TILE_ROWS ? rows - i : TILE_ROWS, cols - j,
                      [&](auto tile) __attribute__((always_inline)) {
                          tile.add_product({a.data + i * a.row, a.row, a.col}, b.data + j, b.row, depth);
                          tile.write_sum(factor, row(d, i) + j, d.row, row(c, i) + j, c.row);
                      });
    }
}

}  // namespace UNROLLED_ISA
