// Products of rows of x by packed weights in fp32.
#pragma once

#include "tile_output.h"

namespace UNROLLED_ISA {

// What is read next: a share of it is requested for each input of a block, so that reading takes no time of
// its own. One row alone waits for memory whatever is requested.
struct Ahead {
    const char* at;
    Int share;  // lines for each input, times 256

    void request(Int i) const {
        asm volatile("");  // GCC drops calls without side effects, and counts a prefetch as none
        const char* line = at + (i * share >> 8) * LINE;
        __builtin_prefetch(line);
        __builtin_prefetch(line + LINE);
        if (share > 2 * 256) __builtin_prefetch(line + 2 * LINE), __builtin_prefetch(line + 3 * LINE);
    }
};

// Adds the products of some inputs of a tile; the first of them start from the bias.
template <int ROWS>
void multiply_float32(const float* w, Int inputs, bool first, const float* x, Int x_row,
                      const TileOutput& out, Ahead ahead) {
    constexpr int VECS = vecs_for(ROWS);
    for (Int i = 0; i < TILE; i += VECS * WIDTH) {
        Vec sums[ROWS][VECS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < VECS; ++v) {
                const Int at = i + v * WIDTH;
                sums[r][v] = !first ? load(out.y + r * out.row + at) : out.bias ? load(out.bias + at) : Vec{};
            }
        for (Int k = 0; k < inputs; ++k) {
            if (ROWS > 1) ahead.request(i / (VECS * WIDTH) * inputs + k);
            Vec left[VECS];
#pragma GCC unroll 16
            for (int v = 0; v < VECS; ++v) left[v] = load(w + k * TILE + i + v * WIDTH);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const Vec right = broadcast(x[r * x_row + k]);
#pragma GCC unroll 16
                for (int v = 0; v < VECS; ++v) sums[r][v] += left[v] * right;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < VECS; ++v) store(out.y + r * out.row + i + v * WIDTH, sums[r][v]);
    }
}

// Multiplies `rows` rows by the tiles [first, last) in fp32. A tile is cut into blocks of inputs that stay in
// the first-level cache for all rows. Meanwhile the next block is requested; `next` is read after the last.
inline void multiply_float32_tiles(const Packed& w, Int first, Int last, const float* x, Int x_row, Int rows,
                                   float* y, Int y_row, const void* next) {
    constexpr Int DEPTH = 64;
    const Int groups = ceil_div(rows, TILE_ROWS);
    for (Int tile = first; tile < last; ++tile)
        for (Int k = 0; k < w.inputs; k += DEPTH) {
            const Int inputs = min(DEPTH, w.inputs - k);
            const char *tile_begin = (const char*)w.weights + tile * tile_bytes(w),
                       *block = tile_begin + k * TILE * 4,
                       *tile_end = tile + 1 < last ? tile_begin + tile_bytes(w) : (const char*)next,
                       *ahead = k + DEPTH < w.inputs ? block + DEPTH * TILE * 4 : tile_end;
            for (Int g = 0; g < groups; ++g) {
                const Int r = rows * g / groups, end = rows * (g + 1) / groups;
                const TileOutput out = tile_output(w, tile, y + r * y_row, y_row);
                with_rows(end - r, [&](auto count) {
                    constexpr int ROWS = decltype(count)::value;
                    constexpr Int PASSES = TILE / (vecs_for(ROWS) * WIDTH);
                    multiply_float32<ROWS>((const float*)block, inputs, k == 0, x + r * x_row + k, x_row, out,
                                           {ahead + g * (inputs * TILE * 4 / groups),
                                            TILE * 4 / LINE * 256 / (groups * PASSES)});
                });
            }
        }
}

}  // namespace UNROLLED_ISA
