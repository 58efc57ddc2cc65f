// Products by packed weights in 8 and 4 bits on processors that multiply small integers:
//
// AVX-512 VNNI: sums of four products of an unsigned and a signed byte.
// Arm's dot products: sums of four products of two signed bytes.
// AVX2: sums of two products of 16-bit numbers; for INT4_TILES, of bytes, whose sums must fit into 16 bits.
#pragma once

#include "packed_blocks.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define UNROLLED_BYTES __attribute__((target("avx512vnni")))
#elif defined(__AVX2__)
#define UNROLLED_BYTES
#elif defined(__ARM_FEATURE_DOTPROD)
#define UNROLLED_BYTES
#elif defined(__aarch64__) && defined(__linux__)
#define UNROLLED_BYTES __attribute__((target("arch=armv8.2-a+dotprod")))
#include <sys/auxv.h>
#endif

namespace UNROLLED_ISA {

// Whether the processor multiplies small integers; if not, the rounded numbers are multiplied as floats.
inline bool multiplies_bytes() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512vnni");
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
    return true;
#elif defined(UNROLLED_BYTES)
    constexpr unsigned long DOT_PRODUCTS = 1ul << 20;  // HWCAP_ASIMDDP
    return getauxval(AT_HWCAP) & DOT_PRODUCTS;
#else
    return false;
#endif
}

#if defined(UNROLLED_BYTES)

typedef uint8_t ByteVec __attribute__((vector_size(WIDTH)));
typedef uint8_t UnalignedByteVec __attribute__((vector_size(WIDTH), aligned(1), may_alias));

inline void store_bytes(uint8_t* at, IntVec x) {
    *(UnalignedByteVec*)at = __builtin_convertvector(x, ByteVec);
}

inline IntVec load_words(const void* at) { return (IntVec)load((const float*)at); }

// Keeps the compiler from reading a value again from memory, and from summing products in another order,
// which needs more registers.
inline void keep_in_register([[maybe_unused]] IntVec& x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#endif
}

// Requests the weights that lie `LATER` bytes behind some. Products of several rows take some outputs of a
// tile at a time, and skip the others. Processors do not foresee that: weights that were not in the cache
// took up to twice as long on a Zen 5. By default, `LATER` is a multiple of the bytes of four inputs in
// INT8_TILES and of a group in INT4_TILES, so that the weights of the same outputs are requested.
template <Int LATER = 14 * GROUP_BYTES>
inline void request_later(const char* weights, Int bytes) {
    asm volatile("");  // as in `Ahead`
    for (Int i = 0; i < bytes; i += LINE) __builtin_prefetch(weights + LATER + i);
}

// Four bytes, or two numbers of 16 bits, in each lane.
inline IntVec repeat_word(const void* at) {
    int32_t word;
    std::memcpy(&word, at, 4);
    return word - IntVec{};
}

#if defined(__AVX512F__)
// Adds to each lane the products of its four bytes; those of `left` are unsigned.
UNROLLED_BYTES inline IntVec add_four(IntVec sums, IntVec left, IntVec right) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)left, (__m512i)right);
}
#elif defined(__aarch64__)
UNROLLED_BYTES inline IntVec add_four(IntVec sums, IntVec left, IntVec right) {
    return (IntVec)vdotq_s32((int32x4_t)sums, (int8x16_t)left, (int8x16_t)right);
}
#else
// Adds to each lane the products of its two 16-bit numbers.
inline IntVec add_two(IntVec sums, IntVec left, IntVec right) {
    return sums + (IntVec)_mm256_madd_epi16((__m256i)left, (__m256i)right);
}
#endif

// For INT4_TILES: adds the products of bytes, those of `left` from 0 to 15, those of `right` signed. On AVX2,
// a lane holds two sums of 16 bits, which is enough for a group.
UNROLLED_BYTES inline IntVec add_small(IntVec sums, IntVec left, IntVec right) {
#if defined(__AVX512F__) || defined(__aarch64__)
    return add_four(sums, left, right);
#else
    return (IntVec)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)left, (__m256i)right));
#endif
}

// How the sum of a group begins and ends: 8 times the sum of the group's numbers of x is subtracted, at the
// beginning or at the end.
#if defined(__AVX512F__) || defined(__aarch64__)
inline IntVec begin_group(int32_t taken) { return IntVec{} - taken; }
inline IntVec end_group(IntVec sums, int32_t) { return sums; }
#else
inline IntVec begin_group(int32_t) { return IntVec{}; }
inline IntVec end_group(IntVec sums, int32_t taken) {
    return add_two(IntVec{}, sums, (IntVec)_mm256_set1_epi16(1)) - taken;
}
#endif

// Writes the whole numbers x[begin, end) as they are multiplied: for INT4_TILES as bytes in `high`; for
// INT8_TILES as two bytes in `high` and `low`, or as numbers of 16 bits in the space of both. In each four of
// the latter, the second and third change places, since the weights of even and of odd inputs are widened
// together.
inline void split_row(const float* x, Int begin, Int end, Int packing, uint8_t* high,
                      [[maybe_unused]] uint8_t* low) {
    for (Int i = begin; i < end; i += WIDTH) {
        const IntVec y = __builtin_convertvector(load(x + i), IntVec);
        if (packing == INT4_TILES) store_bytes(high + i, y);
#if defined(__AVX512F__)
        else store_bytes(high + i, (y + 32768) >> 8), store_bytes(low + i, y + 32768);
#elif defined(__aarch64__)
        else store_bytes(high + i, y >> 8), store_bytes(low + i, y + 128);
#else
        else {
            const HalfVec z = __builtin_convertvector(y, HalfVec);
            *(UnalignedHalfVec*)(high + 2 * i) = __builtin_shufflevector(z, z, 0, 2, 1, 3, 4, 6, 5, 7);
        }
#endif
    }
}

#if defined(__AVX512F__) || defined(__aarch64__)
// W (x / scale), given the products of W with the two bytes, and the sums W 1 in `all`. On AVX-512,
// x / scale + 2^15 = 256 high + low; on Arm, x / scale = 256 high + low + 128.
inline Vec whole_numbers(IntVec high, IntVec low, IntVec all) {
#if defined(__AVX512F__)
    high -= all << 7;
#else
    low += all << 7;
#endif
    return __builtin_convertvector(high, Vec) * broadcast(256) + __builtin_convertvector(low, Vec);
}

template <int ROWS>
UNROLLED_BYTES void multiply_int8_bytes(const char* w, Int inputs, const PackedRows& x, const int32_t* sums,
                                        const TileOutput& out) {
    constexpr int VECS = vecs_for(ROWS, 2);
    for (Int i = 0; i < TILE; i += VECS * WIDTH) {
        IntVec high[ROWS][VECS] = {}, low[ROWS][VECS] = {};
        for (Int k = 0; k < inputs; k += 4) {
            request_later(w + k * TILE + 4 * i, VECS * WIDTH * 4);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const IntVec h = repeat_word(x.high + r * x.bytes + k),
                             l = repeat_word(x.low + r * x.bytes + k);
#pragma GCC unroll 4
                for (int v = 0; v < VECS; ++v) {
                    IntVec weights = load_words(w + k * TILE + 4 * (i + v * WIDTH));
                    keep_in_register(weights);
                    high[r][v] = add_four(high[r][v], h, weights);
                    low[r][v] = add_four(low[r][v], l, weights);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) {
                const IntVec all = load_words(sums + i + v * WIDTH);
                out.write(r, i + v * WIDTH, whole_numbers(high[r][v], low[r][v], all), x.scales[r]);
            }
    }
}
#else
// Widens four weights of WIDTH outputs to 16 bits: those of the even inputs, or of the odd ones.
inline IntVec widen_bytes(IntVec weights, bool odd) {
    const __m256i bytes = (__m256i)weights;
    return (IntVec)_mm256_srai_epi16(odd ? bytes : _mm256_slli_epi16(bytes, 8), 8);
}

// How far ahead a single row requests weights. Without that, weights that were not in the cache took up to
// twice as long on a Zen 3.
constexpr Int LATER_OF_A_ROW = 4096;

// How many products of an 8-bit and a 16-bit number are summed in 32 bits; up to 516 would fit.
constexpr Int INTEGER_SUM = 128;

// Adds the products of one row by some inputs of a tile to the totals of its outputs. It is not inlined,
// since the compiler would then keep the totals in registers, and the sums of the inner loop in memory.
__attribute__((noinline)) inline void add_int8(const char* w, Int inputs, const uint8_t* x, float* totals) {
    constexpr int VECS = TILE / WIDTH;
    IntVec sums[VECS] = {};
    for (Int k = 0; k < inputs; k += 4) {
        request_later<LATER_OF_A_ROW>(w + k * TILE, STEP_BYTES);
        const IntVec even = repeat_word(x + 2 * k), odd = repeat_word(x + 2 * k + 4);
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) {
            IntVec weights = load_words(w + k * TILE + 4 * v * WIDTH);
            keep_in_register(weights);
            sums[v] = add_two(sums[v], widen_bytes(weights, false), even);
            sums[v] = add_two(sums[v], widen_bytes(weights, true), odd);
            keep_in_register(sums[v]);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) {
        float* at = totals + v * WIDTH;
        store(at, load(at) + __builtin_convertvector(sums[v], Vec));
    }
}

// Of one row: several are multiplied by weights that were widened before.
template <int>
void multiply_int8_bytes(const char* w, Int inputs, const PackedRows& x, const int32_t*,
                         const TileOutput& out) {
    float totals[TILE] = {};
    for (Int k = 0; k < inputs; k += INTEGER_SUM)
        add_int8(w + k * TILE, min(inputs - k, INTEGER_SUM), x.high + 2 * k, totals);
    for (int i = 0; i < TILE; i += WIDTH) out.write(0, i, load(totals + i), x.scales[0]);
}

// As `add_int8`, for a group of INT4_TILES.
__attribute__((noinline)) inline void add_int4(const char* group, const uint8_t* x, int32_t taken,
                                               float scale, float* totals) {
    constexpr int VECS = TILE / WIDTH;
    IntVec sums[VECS] = {};
    for (Int p = 0; p < GROUP / 8; ++p) {
        request_later<LATER_OF_A_ROW>(group + TILE * 2 + 4 * p * TILE, STEP_BYTES);
        const IntVec low = repeat_word(x + 8 * p), high = repeat_word(x + 8 * p + 4);
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) {
            IntVec both = load_words(group + TILE * 2 + 4 * (p * TILE + v * WIDTH));
            keep_in_register(both);
            sums[v] = add_small(sums[v], both & 0x0f0f0f0f, low);
            sums[v] = add_small(sums[v], both >> 4 & 0x0f0f0f0f, high);
            keep_in_register(sums[v]);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) {
        float* at = totals + v * WIDTH;
        const Vec factor = load_as<BFLOAT16>(group + 2 * v * WIDTH) * broadcast(scale);
        store(at, load(at) + __builtin_convertvector(end_group(sums[v], taken), Vec) * factor);
    }
}

inline void multiply_int4_row(const char* w, Int inputs, const PackedRows& x, const TileOutput& out) {
    float totals[TILE] = {};
    for (Int g = 0; g < inputs / GROUP; ++g)
        add_int4(w + g * GROUP_BYTES, x.high + g * GROUP, x.sums[g], x.scales[g], totals);
    for (int i = 0; i < TILE; i += WIDTH) out.write(0, i, load(totals + i), 1);
}

// Multiplies several rows by a block of INT8_TILES that was widened before; a step has the weights of two
// inputs. `complete` says whether this is the last block.
template <int ROWS>
void multiply_pairs(const Block& block, const uint8_t* x, Int x_row, const float* scales, bool complete,
                    const TileOutput& out) {
    constexpr int VECS = vecs_for(ROWS);
    for (Int i = 0; i < TILE; i += VECS * WIDTH) {
        IntVec sums[ROWS][VECS] = {};
        for (Int k = 0; k < block.steps; ++k) {
            block.ahead.request(i / (VECS * WIDTH) * block.steps + k);
            IntVec left[VECS];
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) left[v] = load_words(block.at(k, i / WIDTH + v));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const IntVec right = repeat_word(x + r * x_row + 4 * k);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; ++v) sums[r][v] = add_two(sums[r][v], left[v], right);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) {
                const Int at = i + v * WIDTH;
                Vec total = __builtin_convertvector(sums[r][v], Vec);
                if (!block.first) total += load(out.y + r * out.row + at);
                if (complete) out.write(r, at, total, scales[r]);
                else store(out.y + r * out.row + at, total);
            }
    }
}

// Multiplies several rows by INT8_TILES, widened to 16 bits.
inline void multiply_widened_int8(const Packed& w, Int first, Int last, const PackedRows& x, Int rows,
                                  float* y, Int y_row, const void* next) {
    constexpr Int FOURS = INTEGER_SUM / 4;
    const Int steps = padded_inputs(w) / 4;
    const auto widen = [](const char* at, float* to) {
        store(to, (Vec)widen_bytes(load_words(at), false));
        store(to + TILE, (Vec)widen_bytes(load_words(at), true));
    };
    const auto multiply = [&](auto count, const Block& block, Int step, Int r, const TileOutput& out) {
        const bool complete = step + FOURS >= steps;
        multiply_pairs<decltype(count)::value>(block, x.high + r * x.bytes + 8 * step, x.bytes, x.scales + r,
                                               complete, out);
    };
    multiply_widened<FOURS>(w, steps, first, last, rows, y, y_row, next, widen, multiply);
}
#endif

template <int ROWS>
UNROLLED_BYTES void multiply_int4_bytes(const char* w, Int inputs, const PackedRows& x,
                                        const TileOutput& out) {
    constexpr int VECS = vecs_for(ROWS, 2);
    const Int groups = inputs / GROUP;
    for (Int i = 0; i < TILE; i += VECS * WIDTH) {
        Vec totals[ROWS][VECS] = {};
        for (Int g = 0; g < groups; ++g) {
            const char* group = w + g * GROUP_BYTES;
            IntVec sums[ROWS][VECS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < VECS; ++v) sums[r][v] = begin_group(x.sums[r * groups + g]);
            request_later(group + 2 * i, VECS * WIDTH * 2);
#pragma GCC unroll 4
            for (Int p = 0; p < GROUP / 8; ++p) {
                request_later(group + TILE * 2 + 4 * (p * TILE + i), VECS * WIDTH * 4);
#pragma GCC unroll 4
                for (int v = 0; v < VECS; ++v) {
                    const IntVec both = load_words(group + TILE * 2 + 4 * (p * TILE + i + v * WIDTH));
                    const IntVec first = both & 0x0f0f0f0f, second = both >> 4 & 0x0f0f0f0f;
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r) {
                        const uint8_t* at = x.high + r * x.bytes + g * GROUP + 8 * p;
                        sums[r][v] = add_small(sums[r][v], first, repeat_word(at));
                        keep_in_register(sums[r][v]);
                        sums[r][v] = add_small(sums[r][v], second, repeat_word(at + 4));
                        keep_in_register(sums[r][v]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) {
                const Vec scale = load_as<BFLOAT16>(group + 2 * (i + v * WIDTH));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
                    totals[r][v] +=
                        __builtin_convertvector(end_group(sums[r][v], x.sums[r * groups + g]), Vec) *
                        (scale * broadcast(x.scales[r * groups + g]));
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v) out.write(r, i + v * WIDTH, totals[r][v], 1);
    }
}

#endif

}  // namespace UNROLLED_ISA
