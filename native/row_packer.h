// Rows of x in the forms that packed weights are multiplied by.
#pragma once

#include "packed_blocks.h"
#include "packed_bytes.h"

namespace UNROLLED_ISA {

// Brings rows of x into the form for one packing. One thread uses it.
class RowPacker {
  public:
    // For products of up to `rows` rows of `inputs` floats.
    RowPacker(Int rows, Int inputs, Workspace& memory) {
        row_ = ceil_div(inputs, GROUP) * GROUP + TILE;  // spaced so that rows do not compete for cache sets
        padded_ = memory.floats(rows * row_);
        bytes_ = (uint8_t*)memory.floats(rows * row_ / 2);
        scales_ = memory.floats(rows * ceil_div(inputs, GROUP));
        sums_ = (int32_t*)memory.floats(rows * ceil_div(inputs, GROUP));
    }

    PackedRows pack(const Packed& w, const float* x, Int x_row, Int rows, bool matrix_unit) {
        const Int n = w.inputs, whole = padded_inputs(w);
        if (w.packing == BFLOAT16_TILES && matrix_unit) return halve(x, x_row, rows, n, whole);
        const bool pairs = w.packing == BFLOAT16_TILES && multiplies_bfloat16_pairs();
        if (w.packing == FLOAT32_TILES || (w.packing == BFLOAT16_TILES && n % 2 == 0 && !pairs))
            return {x, x_row, nullptr, nullptr, 0, nullptr, nullptr};
        const Int groups = w.packing == INT4_TILES ? whole / GROUP : 1;
        for (Int r = 0; r < rows; ++r) {
            float* to = padded_ + r * row_;
            [[maybe_unused]] uint8_t* bytes = bytes_ + r * 2 * row_;
            std::memcpy(to, x + r * x_row, (size_t)n * 4);
            std::memset(to + n, 0, (size_t)(whole - n) * 4);
            if (pairs) write_row<BFLOAT16>(to, whole, bytes);
            if (w.packing == BFLOAT16_TILES) continue;
            for (Int g = 0; g < groups; ++g) {
                const Int begin = g * (whole / groups), end = begin + whole / groups;
                round(to, begin, end, w.packing == INT8_TILES ? 32767.0f : 127.0f, r * groups + g);
#if defined(UNROLLED_BYTES)
                if (multiplies_bytes()) split_row(to, begin, end, w.packing, bytes, bytes + row_);
#endif
            }
        }
        return {padded_, row_, bytes_, bytes_ + row_, 2 * row_, scales_, sums_};
    }

  private:
    // Splits x into sums of two bfloat16 numbers, whose bytes lie in `high` and `low`.
    PackedRows halve(const float* x, Int x_row, Int rows, Int n, Int whole) {
        for (Int r = 0; r < rows; ++r) {
            uint16_t *high = (uint16_t*)(padded_ + r * row_), *low = high + row_;
            for (Int i = 0; i < whole; i += WIDTH) {
                const Vec y = first_lanes(i < n ? load_first(x + r * x_row + i, n - i) : Vec{}, n - i);
                const HalfVec upper = narrow<BFLOAT16>(y);
                *(UnalignedHalfVec*)(high + i) = upper;
                store_as<BFLOAT16>(low + i, y - widen<BFLOAT16>(upper));
            }
        }
        const uint8_t* begin = (const uint8_t*)padded_;
        return {nullptr, 0, begin, begin + 2 * row_, 4 * row_, nullptr, nullptr};
    }

    void round(float* x, Int begin, Int end, float most, Int place) {
        constexpr float SMALLEST = 0x1p-100f;  // below, the factor or the scale would be no normal float
        float size = largest(x + begin, end - begin);
        if (size < SMALLEST) size = SMALLEST;
        const Vec factor = broadcast(size > 0 ? most / size : 0);
        Vec total{};
        for (Int i = begin; i < end; i += WIDTH) {
            const Vec y = round_to_integers(load(x + i) * factor);
            store(x + i, y);
            total += y;
        }
        scales_[place] = size / most;
        sums_[place] = size == size ? 8 * (int32_t)sum(total) : 0;
    }

    Int row_;
    float *padded_, *scales_;
    uint8_t* bytes_;
    int32_t* sums_;
};

}  // namespace UNROLLED_ISA
