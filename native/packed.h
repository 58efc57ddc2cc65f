// Packed weights, and the rows of x that they are multiplied by.
//
// W [outputs, inputs] is cut into tiles of 64 outputs; outputs are padded with zeros to a multiple of 64,
// inputs to a multiple of 32. In a tile, the numbers of one input (or of a pair, or of four) lie together for
// all 64 outputs, so that a product reads them in the order of memory, and sums nothing across lanes:
//
// FLOAT32_TILES: [tile][input][64] floats.
// BFLOAT16_TILES: [tile][input / 2][64][2] bfloat16.
// INT8_TILES: [tile][input / 4][64][4] int8; each output has a scale.
// INT4_TILES: [tile][input / 32] groups of scales [64] in bfloat16, then [4][64][4] bytes: byte e of the p-th
// of the four holds inputs 8 p + e in its low half and 8 p + 4 + e in its high half, each plus 8.
//
// Rows of x are rounded too: for INT8_TILES to 16 bits relative to the largest number of the row, for
// INT4_TILES to 8 bits relative to the largest of each 32 numbers, and for BFLOAT16_TILES to bfloat16 where
// the processor multiplies pairs of such numbers (`packed_blocks.h`).
#pragma once

#include "rows.h"

namespace UNROLLED_ISA {

constexpr Int TILE = 64, GROUP = 32, GROUP_BYTES = TILE * 2 + TILE * GROUP / 2;

inline Int padded_inputs(const Packed& w) { return ceil_div(w.inputs, GROUP) * GROUP; }

inline Int tile_bytes(const Packed& w) {
    const Int n = padded_inputs(w);
    if (w.packing == FLOAT32_TILES) return n * TILE * 4;
    if (w.packing == BFLOAT16_TILES) return n * TILE * 2;
    if (w.packing == INT8_TILES) return n * TILE;
    return n / GROUP * GROUP_BYTES;
}

// Rows of x in the form that the weights are multiplied by.
struct PackedRows {
    const float* x;  // as they are, or rounded and divided by their scale
    Int row;         // from one row to the next, in floats
    // Parts of x / scale for products of bytes, or parts of x for the matrix unit; x in bfloat16, for
    // products of pairs, lies in `high`.
    const uint8_t *high, *low;
    Int bytes;            // from one row of these parts to the next
    const float* scales;  // INT8_TILES: one per row. INT4_TILES: one per group
    const int32_t* sums;  // INT4_TILES: 8 times the sum of each group of rounded numbers

    // The rows from number r on, whose scales begin at `place`.
    PackedRows from(Int r, Int place) const {
        if (!scales) return {x + r * row, row, nullptr, nullptr, 0, nullptr, nullptr};
        return {x + r * row, row, high + r * bytes, low + r * bytes, bytes, scales + place, sums + place};
    }
};

// The largest absolute value of whole vectors; NaN if one of them is infinite or NaN. Without their signs,
// floats are in the order of their bits, and infinity and NaN are the last.
inline float largest(const float* x, Int n) {
    constexpr int32_t INFINITE = 0x7f800000;
    IntVec most{};
    for (Int i = 0; i < n; i += WIDTH) {
        const IntVec size = (IntVec)load(x + i) & 0x7fffffff;
        most = size > most ? size : most;
    }
    const int32_t bits = largest(most);
    float result;
    std::memcpy(&result, &bits, 4);
    return bits < INFINITE ? result : __builtin_nanf("");
}

inline Vec round_to_integers(Vec x) { return (x + broadcast(12582912.0f)) - broadcast(12582912.0f); }

}  // namespace UNROLLED_ISA
