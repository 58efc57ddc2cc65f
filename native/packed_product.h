// y = x W^T + b for packed weights. For one row of x, this takes as long as reading the weights from memory.
// Several rows are multiplied by a tile while it is in the cache, a few at a time, with their sums in
// registers.
#pragma once

#include "row_packer.h"

namespace UNROLLED_ISA {

// Multiplies by words that hold the weights of several inputs: `expand(word, e)` is the e-th of them as
// floats.
template <int ROWS, int PER_LANE, typename Expand>
__attribute__((always_inline)) inline void multiply_words(const uint32_t* w, Int words, const float* x,
                                                          Int x_row, Int i, Vec (*sums)[vecs_for(ROWS)],
                                                          Expand&& expand) {
    constexpr int VECS = vecs_for(ROWS);
    for (Int k = 0; k < words; ++k) {
        BitVec word[VECS];
#pragma GCC unroll 16
        for (int v = 0; v < VECS; ++v) word[v] = (BitVec)load((const float*)w + k * TILE + i + v * WIDTH);
#pragma GCC unroll 8
        for (int e = 0; e < PER_LANE; ++e) {
            Vec left[VECS];
#pragma GCC unroll 16
            for (int v = 0; v < VECS; ++v) left[v] = expand(word[v], e);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const Vec right = broadcast(x[r * x_row + k * PER_LANE + e]);
#pragma GCC unroll 16
                for (int v = 0; v < VECS; ++v) sums[r][v] += left[v] * right;
            }
        }
    }
}

template <int ROWS>
void multiply_bfloat16(const uint32_t* w, Int inputs, const float* x, Int x_row, const TileOutput& out) {
    constexpr int VECS = vecs_for(ROWS);
    for (Int i = 0; i < TILE; i += VECS * WIDTH) {
        Vec sums[ROWS][VECS];
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v) sums[r][v] = out.bias ? load(out.bias + i + v * WIDTH) : Vec{};
        multiply_words<ROWS, 2>(w, ceil_div(inputs, 2), x, x_row, i, sums, [](BitVec word, int e) {
            return (Vec)(e ? word & 0xffff0000u : word << 16);
        });
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v) store(out.y + r * out.row + i + v * WIDTH, sums[r][v]);
    }
}

template <int ROWS>
void multiply_int8(const uint32_t* w, Int inputs, const PackedRows& x, const TileOutput& out) {
    constexpr int VECS = vecs_for(ROWS);
    for (Int i = 0; i < TILE; i += VECS * WIDTH) {
        Vec sums[ROWS][VECS] = {};
        multiply_words<ROWS, 4>(w, inputs / 4, x.x, x.row, i, sums, [](BitVec word, int e) {
            return __builtin_convertvector((IntVec)(word << (24 - 8 * e)) >> 24, Vec);
        });
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v) out.write(r, i + v * WIDTH, sums[r][v], x.scales[r]);
    }
}

template <int ROWS>
void multiply_int4(const char* w, Int inputs, const PackedRows& x, const TileOutput& out) {
    constexpr int VECS = vecs_for(ROWS);
    constexpr Int WORDS = GROUP / 8;
    const Int groups = inputs / GROUP;
    for (Int i = 0; i < TILE; i += VECS * WIDTH) {
        Vec totals[ROWS][VECS] = {};
        for (Int g = 0; g < groups; ++g) {
            const char* group = w + g * GROUP_BYTES;
            Vec sums[ROWS][VECS] = {};
            multiply_words<ROWS, 8>((const uint32_t*)(group + TILE * 2), WORDS, x.x + g * GROUP, x.row, i,
                                    sums, [](BitVec word, int e) {
                                        const BitVec half = word >> (8 * (e % 4) + (e >= 4 ? 4 : 0)) & 15;
                                        return __builtin_convertvector((IntVec)half - 8, Vec);
                                    });
            for (int v = 0; v < VECS; ++v) {
                const Vec scale = load_as<BFLOAT16>(group + 2 * (i + v * WIDTH));
                for (int r = 0; r < ROWS; ++r)
                    totals[r][v] += sums[r][v] * scale * broadcast(x.scales[r * groups + g]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v) out.write(r, i + v * WIDTH, totals[r][v], 1);
    }
}

// Multiplies `ROWS` rows by one tile.
template <int ROWS>
void multiply_tile(const Packed& w, Int tile, const PackedRows& x, const TileOutput& out) {
    const char* weights = (const char*)w.weights + tile * tile_bytes(w);
    const Int inputs = padded_inputs(w);
    if (w.packing == BFLOAT16_TILES)
        return multiply_bfloat16<ROWS>((const uint32_t*)weights, w.inputs, x.x, x.row, out);
#if defined(UNROLLED_BYTES)
    if (multiplies_bytes()) {
        if (w.packing == INT8_TILES)
            return multiply_int8_bytes<ROWS>(weights, inputs, x, w.sums + tile * TILE, out);
#if defined(__AVX2__) && !defined(__AVX512F__)
        if (ROWS == 1) return multiply_int4_row(weights, inputs, x, out);
#endif
        return multiply_int4_bytes<ROWS>(weights, inputs, x, out);
    }
#endif
    if (w.packing == INT8_TILES) return multiply_int8<ROWS>((const uint32_t*)weights, inputs, x, out);
    multiply_int4<ROWS>(weights, inputs, x, out);
}

#if defined(UNROLLED_AMX)
// The same for many rows, 16 at a time.
AMX inline void multiply_tiles_amx(const Packed& w, Int first, Int last, const PackedRows& x, Int rows,
                                   float* y, Int y_row) {
    alignas(64) float sums[AMX_ROWS][TILE];
    alignas(64) int32_t high[AMX_ROWS][TILE], low[AMX_ROWS][TILE];
    for (Int r = 0; r < rows; r += AMX_ROWS) {
        const Int n = min(AMX_ROWS, rows - r);
        const Halves halves{(const char*)x.high + r * x.bytes, (const char*)x.low + r * x.bytes, x.bytes};
        configure(n);
        for (Int tile = first; tile < last; ++tile) {
            const char* weights = (const char*)w.weights + tile * tile_bytes(w);
            const bool whole = w.packing == INT8_TILES;
            const TileOutput out = tile_output(w, tile, y + r * y_row, y_row);
            if (whole) amx_int8(weights, padded_inputs(w), halves, high, low);
            else amx_bfloat16(weights, padded_inputs(w), halves, sums);
            for (Int k = 0; k < n; ++k)
                for (Int i = 0; i < TILE; i += WIDTH) {
                    if (whole)
                        out.write(k, i,
                                  whole_numbers(load_words(high[k] + i), load_words(low[k] + i),
                                                load_words(w.sums + tile * TILE + i)),
                                  x.scales[r + k]);
                    else out.write(k, i, load(sums[k] + i), 1);
                }
        }
    }
    release_tiles();
}
#endif

// Multiplies `rows` rows by the tiles [first, last). `next` is what will be read after them.
inline void multiply_tiles(const Packed& w, Int first, Int last, const PackedRows& x, Int rows,
                           [[maybe_unused]] bool matrix_unit, float* y, Int y_row, const void* next) {
    if (w.packing == FLOAT32_TILES) return multiply_float32_tiles(w, first, last, x, rows, y, y_row, next);
#if defined(UNROLLED_AMX)
    if (matrix_unit) return multiply_tiles_amx(w, first, last, x, rows, y, y_row);
#endif
#if defined(UNROLLED_BFLOAT16_PAIRS)
    if (w.packing == BFLOAT16_TILES && multiplies_bfloat16_pairs())
        return multiply_bfloat16_tiles(w, first, last, x, rows, y, y_row, next);
#endif
    if (FEW_REGISTERS && rows > 1 && w.packing == BFLOAT16_TILES)
        return multiply_widened_bfloat16(w, first, last, x, rows, y, y_row, next);
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (rows > 1 && w.packing == INT8_TILES)
        return multiply_widened_int8(w, first, last, x, rows, y, y_row, next);
#endif
    const Int scales = w.packing == INT4_TILES ? padded_inputs(w) / GROUP : 1,
              groups = ceil_div(rows, TILE_ROWS);
    for (Int tile = first; tile < last; ++tile)
        for (Int g = 0; g < groups; ++g) {
            const Int r = rows * g / groups, end = rows * (g + 1) / groups, place = r * scales;
            const PackedRows some = x.from(r, place);
            const TileOutput out = tile_output(w, tile, y + r * y_row, y_row);
            with_rows(end - r,
                      [&](auto count) { multiply_tile<decltype(count)::value>(w, tile, some, out); });
        }
}

}  // namespace UNROLLED_ISA
