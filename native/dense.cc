// y = x W^T + b for a few rows x, as in a step of generation. Reading the weights takes most of the time, so
// they are read once and in the order of memory, which the hardware prefetcher follows.
//
// Each thread has a range of the outputs:
// 1. Read the rows of x as floats.
// 2. Multiply, in one of two ways:
//    a. a few rows: lanes hold inputs, and each output is a dot product;
//    b. more than half a vector of rows: lanes hold rows of x, which is transposed first.
// 3. Add the bias and write.
#include "kernels.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int DEPTH = 64;  // terms of a partial sum: the total is rounded once per 64 terms

// 2a. Dot products of one row of weights and `N` rows of x, which are padded with zeros to whole vectors.
template <Type type, int N>
void dots(const char* weights, Int width, Rows x, Rows y) {
    constexpr int SUMS = 8 / N;  // independent sums for each row, which hide the latency of an addition
    constexpr Int SIZE = size_of(type);
    Vec sums[N][SUMS] = {};
    Int i = 0;
    for (; i + SUMS * WIDTH <= width; i += SUMS * WIDTH)
#pragma GCC unroll 8
        for (int s = 0; s < SUMS; ++s) {
            const Vec w = load_as<type>(weights + (i + s * WIDTH) * SIZE);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[n][s] += w * load(x.data + n * x.row + i + s * WIDTH);
        }
    for (; i < width; i += WIDTH) {
        float w[WIDTH];
        read_row<type>(weights + i * SIZE, min(WIDTH, width - i), w);
        for (int n = 0; n < N; ++n) sums[n][0] += load(w) * load(x.data + n * x.row + i);
    }
    for (int n = 0; n < N; ++n) {
        for (int s = 1; s < SUMS; ++s) sums[n][0] += sums[n][s];
        y.data[n * y.row] = sum(sums[n][0]);
    }
}

// 2a. Lanes hold inputs.
template <Type type>
void multiply_dots(const char* weights, Int outputs, Int inputs, Int rows, Rows x, Rows y) {
    constexpr Int SIZE = size_of(type);
    for (Int i = 0; i < outputs; ++i, weights += inputs * SIZE) {
        Int n = 0;
        for (; n + 4 <= rows; n += 4)
            dots<type, 4>(weights, inputs, {x.data + n * x.row, x.row}, {y.data + n * y.row + i, y.row});
        for (; n < rows; ++n)
            dots<type, 1>(weights, inputs, {x.data + n * x.row, x.row}, {y.data + n * y.row + i, y.row});
    }
}

// 2b. Lanes hold rows of x, which is transposed, so that nothing is summed across lanes.
template <Type type>
Status multiply_lanes(const char* weights, Int outputs, Int inputs, Int rows, Rows x, Rows y) {
    constexpr Int SIZE = size_of(type);
    Workspace memory;
    const Rows widened = memory.rows(TILE_ROWS, round_up(inputs)),
               out = memory.rows(TILE_ROWS, round_up(rows));
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int i = 0; i < outputs; i += TILE_ROWS) {
        const Int n = min(TILE_ROWS, outputs - i);
        const char *here = weights + i * inputs * SIZE, *next = here + n * inputs * SIZE;
        Strided block{(const float*)here, inputs, 1};
        if (type != FLOAT32) {
            block = {widened.data, widened.row, 1};
            for (Int j = 0; j < n; ++j)
                read_row<type>(here + j * inputs * SIZE, inputs, widened.data + j * widened.row);
        }
        const Int left = (outputs - i - n) * inputs * SIZE;
        for (Int k = 0; k < inputs; k += DEPTH) {
            // Prefetches a part of the next block of weights while this one is multiplied.
            prefetch_row<false>(next + k * n * SIZE, min(DEPTH * n * SIZE, left - k * n * SIZE));
            multiply_few_rows(n, rows, min(DEPTH, inputs - k), {block.data + k, block.row, 1},
                              {x.data + k * x.row, x.row}, out, k > 0);
        }
        for (Int j = 0; j < n; ++j)
            for (Int r = 0; r < rows; ++r) y.data[r * y.row + i + j] = out.data[j * out.row + r];
    }
    return SUCCESS;
}

template <Type type>
Status run(const Dense& d) {
    constexpr Int SIZE = size_of(type);
    const bool in_lanes = d.rows > WIDTH / 2;
    const Int threads = max(1, min(d.threads, d.inputs * d.outputs / WEIGHTS_PER_THREAD));
    return parallel_for(threads, threads, [&](Int part) {
        const Int first = d.outputs * part / threads, n = d.outputs * (part + 1) / threads - first;
        const char* weights = (const char*)d.weights + first * d.inputs * SIZE;
        Workspace memory;
        // Rows are a vector apart: at a distance of a power of two they would compete for the same cache
        // sets.
        const Int rows = in_lanes ? round_up(d.rows) : d.rows, width = round_up(d.inputs) + WIDTH;
        const Rows x{memory.zeros(rows * width), width};
        const Rows y = memory.rows(d.rows, round_up(n) + WIDTH);
        const Rows x_T = in_lanes ? memory.rows(round_up(d.inputs), rows) : Rows{};
        float* bias = memory.zeros(round_up(n));
        if (memory.failed()) return OUT_OF_MEMORY;
        // 1. Rows of x.
        for (Int r = 0; r < d.rows; ++r)
            read_row<type>((const char*)d.x + r * d.inputs * SIZE, d.inputs, x.data + r * x.row);
        // 2. Product.
        if (in_lanes) {
            transpose(rows, d.inputs, x.data, x.row, x_T);
            const Status status = multiply_lanes<type>(weights, n, d.inputs, d.rows, x_T, y);
            if (status != SUCCESS) return status;
        } else multiply_dots<type>(weights, n, d.inputs, d.rows, x, y);
        // 3. Bias.
        if (d.bias) read_row<type>((const char*)d.bias + first * SIZE, n, bias);
        for (Int r = 0; r < d.rows; ++r) {
            float* row = y.data + r * y.row;
            for (Int i = 0; i < n; i += WIDTH) store(row + i, load(row + i) + load(bias + i));
            write_row<type>(row, n, (char*)d.y + (r * d.outputs + first) * SIZE);
        }
        return SUCCESS;
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(dense)(const Dense* d) {
    using namespace UNROLLED_ISA;
    if (d->type == FLOAT32) return run<FLOAT32>(*d);
    if (d->type == BFLOAT16) return run<BFLOAT16>(*d);
    return run<FLOAT16>(*d);
}
