// What products by packed weights share in all forms: how many sums stay in registers, and where they go.
#pragma once

#include "packed.h"

namespace UNROLLED_ISA {

// How many vectors of outputs are summed at once for some rows, so that all sums fit into registers.
constexpr int vecs_for(int rows, int sums_per_output = 1) {
    int vecs = TILE / WIDTH;
    while (vecs > 1 && vecs * rows * sums_per_output > TILE_ROWS * TILE_VECS) vecs /= 2;
    return vecs;
}

// Where one tile of outputs goes: y = sums * scale + bias.
struct TileOutput {
    float* y;
    Int row;
    const float *scales, *bias;  // of this tile's outputs; no scales for weights in floating point

    void write(Int r, Int i, Vec sums, float scale) const {
        const Vec factor = scales ? load(scales + i) * broadcast(scale) : broadcast(scale);
        // One sum with a bias or without. With a branch for each, compilers fuse the product and the sum for
        // some numbers of rows only, and a row's result would depend on the rows beside it.
        const Vec added = bias ? load(bias + i) : Vec{};
        store(y + r * row + i, sums * factor + added);
    }
};

inline TileOutput tile_output(const Packed& w, Int tile, float* y, Int y_row) {
    const float* scales = w.packing == INT8_TILES ? w.scales + tile * TILE : nullptr;
    return {y + tile * TILE, y_row, scales, w.bias ? w.bias + tile * TILE : nullptr};
}

}  // namespace UNROLLED_ISA
