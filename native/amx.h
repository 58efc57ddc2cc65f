// Products of many rows by packed weights on Intel's matrix unit (AMX), which multiplies a tile of 16 rows of
// x by 32 inputs of 16 outputs (64 inputs in int8) in 16 cycles. The packed layouts are those that it loads.
//
// 1. bf16: x is split into a sum of two bfloat16 numbers, exact to 2^-17 of its size. Both are multiplied by
//    the weights, with sums in fp32, so that up to rounding, a row has the same result as alone.
// 2. int8: the two bytes of x are multiplied, as without the unit.
#pragma once

#include "packed.h"

#if defined(__AVX512F__) && defined(__linux__)
#define UNROLLED_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace UNROLLED_ISA {

constexpr Int AMX_ROWS = 16;        // rows of a tile
constexpr Int FEWEST_AMX_ROWS = 5;  // with fewer, a row at a time is as fast

#if defined(UNROLLED_AMX)

// Asks the kernel of Linux for the registers, once in a process.
inline bool amx_available() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    constexpr unsigned BITS = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
    static const bool available = [] {
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BITS) == BITS &&
               syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }();
    return available;
}

#define AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 weights.
AMX inline void configure(Int rows) {
    TileConfig config;
    for (int i = 0; i < 7; ++i) config.bytes[i] = 64, config.rows[i] = (uint8_t)(i < 6 ? rows : 16);
    _tile_loadconfig(&config);
    asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
}

// Two halves of rows of x, whose rows are `row` bytes apart.
struct Halves {
    const char *high, *low;
    Int row;
};

AMX inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

AMX inline void amx_bfloat16(const char* w, Int inputs, const Halves& x, float (*sums)[TILE]) {
    clear_sums();
    for (Int k = 0; k < inputs; k += 32, w += 16 * TILE * 4) {
        _tile_loadd(4, x.high + 2 * k, x.row);
        _tile_loadd(5, x.low + 2 * k, x.row);
        _tile_loadd(6, w, TILE * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(6, w + 64, TILE * 4);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(6, w + 128, TILE * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, w + 192, TILE * 4);
        _tile_dpbf16ps(3, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, sums[0], TILE * 4);
    _tile_stored(1, sums[0] + 16, TILE * 4);
    _tile_stored(2, sums[0] + 32, TILE * 4);
    _tile_stored(3, sums[0] + 48, TILE * 4);
}

// Sums of the high and of the low bytes, for 32 outputs at a time.
AMX inline void amx_int8(const char* w, Int inputs, const Halves& x, int32_t (*high)[TILE],
                         int32_t (*low)[TILE]) {
    for (Int i = 0; i < TILE; i += 32) {
        clear_sums();
        const char* at = w + 4 * i;
        for (Int k = 0; k < inputs; k += 64, at += 16 * TILE * 4) {
            _tile_loadd(4, x.high + k, x.row);
            _tile_loadd(5, x.low + k, x.row);
            _tile_loadd(6, at, TILE * 4);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 5, 6);
            _tile_loadd(6, at + 64, TILE * 4);
            _tile_dpbusd(2, 4, 6);
            _tile_dpbusd(3, 5, 6);
        }
        _tile_stored(0, high[0] + i, TILE * 4);
        _tile_stored(1, low[0] + i, TILE * 4);
        _tile_stored(2, high[0] + i + 16, TILE * 4);
        _tile_stored(3, low[0] + i + 16, TILE * 4);
    }
}

AMX inline void release_tiles() { _tile_release(); }

// Whether `rows` rows are multiplied on the matrix unit. Sums of bfloat16 products round differently there,
// so with `steady` the unit multiplies any number of rows by bfloat16 weights.
inline bool on_matrix_unit(const Packed& w, Int rows, bool steady) {
    const bool halves = w.packing == BFLOAT16_TILES,
               fits = halves || (w.packing == INT8_TILES && padded_inputs(w) % 64 == 0);
    return fits && (rows >= FEWEST_AMX_ROWS || (steady && halves)) && amx_available();
}

#else

inline bool amx_available() { return false; }
inline bool on_matrix_unit(const Packed&, Int, bool) { return false; }

#endif

}  // namespace UNROLLED_ISA
