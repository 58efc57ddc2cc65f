// Products of rows of x by packed weights in fp32, and by weights in bfloat16 on processors that multiply
// pairs of such numbers (AVX-512 BF16). There, rows of x are rounded to bfloat16 too, which doubles the speed
// for several rows.
//
// For several rows, a tile is cut into blocks of inputs that stay in the first-level cache for all rows.
// Meanwhile the next block is requested. A single row is multiplied by two tiles at once where there are
// enough registers: the sums of one tile would wait for each other, and two streams are read faster than one.
#pragma once

#include "amx.h"
#include "tile_output.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define UNROLLED_BFLOAT16_PAIRS __attribute__((target("avx512bf16")))
#endif

namespace UNROLLED_ISA {

// The weights of a tile that are read together: those of an input in fp32, of two in bfloat16.
constexpr Int STEP_BYTES = TILE * 4;

// What is read next: a share of it is requested in each step of a block, so that reading takes no time of its
// own.
struct Ahead {
    const char* at;
    Int share;  // lines for each step, times 256

    void request(Int i) const {
        asm volatile("");  // GCC drops calls without side effects, and counts a prefetch as none
        const char* line = at + (i * share >> 8) * LINE;
        __builtin_prefetch(line);
        __builtin_prefetch(line + LINE);
        if (share > 2 * 256) __builtin_prefetch(line + 2 * LINE), __builtin_prefetch(line + 3 * LINE);
    }
};

// How many tiles one row is multiplied by at once.
constexpr Count<(2 * TILE / WIDTH <= TILE_ROWS * TILE_VECS ? 2 : 1)> TILES_OF_A_ROW;
constexpr Count<1> ONE;

// Some steps of a tile, or of several; the first ones start from the bias, others from the sums so far.
struct Block {
    const char* weights;
    Int next;  // bytes from one tile to the next
    Int steps;
    bool first;
    Ahead ahead;

    // The weights of vector number `v` of outputs in step `k`.
    const char* at(Int k, Int v) const {
        constexpr Int VECS = TILE / WIDTH;
        return weights + v / VECS * next + k * STEP_BYTES + v % VECS * WIDTH * 4;
    }

    Vec begin(const TileOutput& out, Int r, Int i) const {
        if (!first) return load(out.y + r * out.row + i);
        return out.bias ? load(out.bias + i) : Vec{};
    }
};

// `x` has `x_row` numbers from one row to the next.
template <int ROWS, int TILES>
void multiply_float32(const Block& block, const float* x, Int x_row, const TileOutput& out) {
    constexpr int VECS = TILES * vecs_for(ROWS);
    for (Int i = 0; i < TILES * TILE; i += VECS * WIDTH) {
        Vec sums[ROWS][VECS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < VECS; ++v) sums[r][v] = block.begin(out, r, i + v * WIDTH);
        for (Int k = 0; k < block.steps; ++k) {
            if (ROWS > 1) block.ahead.request(i / (VECS * WIDTH) * block.steps + k);
            Vec left[VECS];
#pragma GCC unroll 16
            for (int v = 0; v < VECS; ++v) left[v] = load((const float*)block.at(k, i / WIDTH + v));
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

// Whether pairs of bfloat16 numbers are multiplied. With a matrix unit they are not: it does not round x for
// many rows, so x is not rounded for few rows either.
inline bool multiplies_bfloat16_pairs() {
#if defined(UNROLLED_BFLOAT16_PAIRS)
    static const bool available = __builtin_cpu_supports("avx512bf16") && !amx_available();
    return available;
#else
    return false;
#endif
}

#if defined(UNROLLED_BFLOAT16_PAIRS)
// The same for bfloat16 numbers.
template <int ROWS, int TILES>
UNROLLED_BFLOAT16_PAIRS void multiply_bfloat16_pairs(const Block& block, const uint16_t* x, Int x_row,
                                                     const TileOutput& out) {
    constexpr int VECS = TILES * vecs_for(ROWS);
    for (Int i = 0; i < TILES * TILE; i += VECS * WIDTH) {
        __m512 sums[ROWS][VECS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) sums[r][v] = (__m512)block.begin(out, r, i + v * WIDTH);
        for (Int k = 0; k < block.steps; ++k) {
            if (ROWS > 1) block.ahead.request(i / (VECS * WIDTH) * block.steps + k);
            __m512bh left[VECS];
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) left[v] = (__m512bh)_mm512_loadu_si512(block.at(k, i / WIDTH + v));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                int32_t pair;
                std::memcpy(&pair, x + r * x_row + 2 * k, 4);
                const __m512bh right = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left[v], right);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) store(out.y + r * out.row + i + v * WIDTH, (Vec)sums[r][v]);
    }
}
#endif

// Multiplies `rows` rows by the tiles [first, last), of `steps` steps each. `multiply(count, tiles, block,
// step, row, out)` does so for `count` rows from number `row` on, `tiles` tiles, and the steps of a block
// from number `step` on. `next` is read after the last tile.
template <Int DEPTH = 64, typename Multiply>
inline void multiply_in_blocks(const Packed& w, Int steps, Int first, Int last, Int rows, float* y, Int y_row,
                               const void* next, Multiply&& multiply) {
    const Int groups = ceil_div(rows, TILE_ROWS);
    for (Int tile = first; tile < last; ++tile)
        for (Int k = 0; k < steps; k += DEPTH) {
            const Int n = min(DEPTH, steps - k);
            const char *tile_begin = (const char*)w.weights + tile * tile_bytes(w),
                       *begin = tile_begin + k * STEP_BYTES,
                       *tile_end = tile + 1 < last ? tile_begin + tile_bytes(w) : (const char*)next,
                       *ahead = k + DEPTH < steps ? begin + DEPTH * STEP_BYTES : tile_end;
            for (Int g = 0; g < groups; ++g) {
                const Int r = rows * g / groups, end = rows * (g + 1) / groups;
                const TileOutput out = tile_output(w, tile, y + r * y_row, y_row);
                with_rows(end - r, [&](auto count) {
                    constexpr Int PASSES = TILE / (vecs_for(decltype(count)::value) * WIDTH);
                    const Ahead share{ahead + g * (n * STEP_BYTES / groups),
                                      STEP_BYTES / LINE * 256 / (groups * PASSES)};
                    multiply(count, ONE, Block{begin, 0, n, k == 0, share}, k, r, out);
                });
            }
        }
}

// The same for one row.
template <typename Multiply>
inline void multiply_a_row(const Packed& w, Int steps, Int first, Int last, float* y, Multiply&& multiply) {
    const auto multiply_some = [&](Int tile, auto tiles) {
        const char* begin = (const char*)w.weights + tile * tile_bytes(w);
        multiply(ONE, tiles, Block{begin, tile_bytes(w), steps, true, {}}, 0, 0, tile_output(w, tile, y, 0));
    };
    Int tile = first;
    for (; tile + TILES_OF_A_ROW.value <= last; tile += TILES_OF_A_ROW.value)
        multiply_some(tile, TILES_OF_A_ROW);
    for (; tile < last; ++tile) multiply_some(tile, ONE);
}

inline void multiply_float32_tiles(const Packed& w, Int first, Int last, const PackedRows& x, Int rows,
                                   float* y, Int y_row, const void* next) {
    const auto multiply = [&](auto count, auto tiles, const Block& block, Int step, Int r,
                              const TileOutput& out) {
        multiply_float32<decltype(count)::value, decltype(tiles)::value>(block, x.x + r * x.row + step, x.row,
                                                                         out);
    };
    if (rows == 1) multiply_a_row(w, w.inputs, first, last, y, multiply);
    else multiply_in_blocks(w, w.inputs, first, last, rows, y, y_row, next, multiply);
}

// Whether words with the weights of several inputs find no register beside the sums of several rows.
constexpr bool FEW_REGISTERS = TILE_VECS == 2;

// Multiplies several rows by weights that are widened first, a block at a time, once for all rows.
// `widen(at, to)` widens a vector of words: half of the weights go to `to`, the others to `to + TILE`.
// `multiply(count, block, step, row, out)` takes the widened block, which has twice as many steps.
template <Int DEPTH, typename Widen, typename Multiply>
inline void multiply_widened(const Packed& w, Int steps, Int first, Int last, Int rows, float* y, Int y_row,
                             const void* next, Widen&& widen, Multiply&& multiply) {
    alignas(64) float widened[2 * DEPTH * TILE];
    const auto multiply_block = [&](auto count, auto, const Block& block, Int step, Int r,
                                    const TileOutput& out) {
        if (r == 0)
            for (Int k = 0; k < block.steps; ++k)
                for (Int i = 0; i < TILE; i += WIDTH)
                    widen(block.at(k, i / WIDTH), widened + 2 * k * TILE + i);
        const Ahead ahead{block.ahead.at, block.ahead.share / 2};
        multiply(count, Block{(const char*)widened, 0, 2 * block.steps, block.first, ahead}, step, r, out);
    };
    multiply_in_blocks<DEPTH>(w, steps, first, last, rows, y, y_row, next, multiply_block);
}

// Multiplies several rows by weights in bfloat16, widened to floats.
inline void multiply_widened_bfloat16(const Packed& w, Int first, Int last, const PackedRows& x, Int rows,
                                      float* y, Int y_row, const void* next) {
    const auto widen = [](const char* at, float* to) {
        const BitVec pair = (BitVec)load((const float*)at);
        store(to, (Vec)(pair << 16));
        store(to + TILE, (Vec)(pair & 0xffff0000u));
    };
    const auto multiply = [&](auto count, const Block& block, Int step, Int r, const TileOutput& out) {
        multiply_float32<decltype(count)::value, 1>(block, x.x + r * x.row + 2 * step, x.row, out);
    };
    multiply_widened<32>(w, ceil_div(w.inputs, 2), first, last, rows, y, y_row, next, widen, multiply);
}

#if defined(UNROLLED_BFLOAT16_PAIRS)
// `x.high` has the rounded rows.
inline void multiply_bfloat16_tiles(const Packed& w, Int first, Int last, const PackedRows& x, Int rows,
                                    float* y, Int y_row, const void* next) {
    const uint16_t* numbers = (const uint16_t*)x.high;
    const Int row = x.bytes / 2, steps = ceil_div(w.inputs, 2);
    const auto multiply = [&](auto count, auto tiles, const Block& block, Int step, Int r,
                              const TileOutput& out) {
        multiply_bfloat16_pairs<decltype(count)::value, decltype(tiles)::value>(
            block, numbers + r * row + 2 * step, row, out);
    };
    if (rows == 1) multiply_a_row(w, steps, first, last, y, multiply);
    else multiply_in_blocks(w, steps, first, last, rows, y, y_row, next, multiply);
}
#endif

}  // namespace UNROLLED_ISA
