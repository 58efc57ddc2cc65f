// Rows of the tensors: read as floats padded to whole vectors, written in the type of the tensor.
#pragma once

#include "arguments.h"
#include "feature_map.h"
#include "pages.h"
#include "parallel.h"

namespace UNROLLED_ISA {

// Vectors of which only the first n numbers exist.
inline Vec load_first(const float* at, Int n) {
    if (n >= WIDTH) return load(at);
    float lanes[WIDTH] = {};
    std::memcpy(lanes, at, (size_t)n * 4);
    return load(lanes);
}

inline void store_first(float* at, Int n, Vec x) {
    if (n >= WIDTH) store(at, x);
    else std::memcpy(at, &x, (size_t)n * 4);
}

// x in the first n lanes, 0 in the others.
inline Vec first_lanes(Vec x, Int n) {
    if (n >= WIDTH) return x;
    IntVec lane;
    for (int i = 0; i < WIDTH; ++i) lane[i] = i;
    return select(lane < (int32_t)n, x, Vec{});
}

template <Type type>
inline Vec load_as(const void* at) {
    if constexpr (type == FLOAT32) return load((const float*)at);
    else return widen<type>(*(const UnalignedHalfVec*)at);
}

template <Type type>
inline void store_as(void* at, Vec x) {
    if constexpr (type == FLOAT32) store((float*)at, x);
    else *(UnalignedHalfVec*)at = narrow<type>(x);
}

constexpr Int size_of(Int type) { return type == FLOAT32 ? 4 : 2; }

template <Type type>
inline void read_row(const void* from, Int n, float* to) {
    constexpr Int SIZE = size_of(type);
    Int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(to + i, load_as<type>((const char*)from + i * SIZE));
    if (i == n) return;
    char rest[WIDTH * SIZE] = {};
    std::memcpy(rest, (const char*)from + i * SIZE, (size_t)((n - i) * SIZE));
    store(to + i, load_as<type>(rest));
}

template <Type type>
inline void write_row(const float* from, Int n, void* to) {
    constexpr Int SIZE = size_of(type);
    Int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store_as<type>((char*)to + i * SIZE, load(from + i));
    if (i == n) return;
    char rest[WIDTH * SIZE];
    store_as<type>(rest, load(from + i));
    std::memcpy((char*)to + i * SIZE, rest, (size_t)((n - i) * SIZE));
}

// Reads `n` elements as floats, followed by zeros up to a whole vector.
inline void read_row(Int type, const void* from, Int n, float* to) {
    if (type == FLOAT32) return read_row<FLOAT32>(from, n, to);
    if (type == BFLOAT16) return read_row<BFLOAT16>(from, n, to);
    read_row<FLOAT16>(from, n, to);
}

// Writes `n` floats in the type of the tensor. `from` must be readable up to a whole vector.
inline void write_row(Int type, const float* from, Int n, void* to) {
    if (type == FLOAT32) return write_row<FLOAT32>(from, n, to);
    if (type == BFLOAT16) return write_row<BFLOAT16>(from, n, to);
    write_row<FLOAT16>(from, n, to);
}

inline const char* address(const Tensor& x, Int type, Int batch, Int token, Int head) {
    return (const char*)x.data + (batch * x.batch + token * x.token + head * x.head) * size_of(type);
}

// Adds `n` tokens of one head to what a prefetcher requests.
inline void prefetch_rows(Prefetcher& prefetcher, const Tensor& x, Int type, Int batch, Int token, Int head,
                          Int n, Int width) {
    prefetcher.add(address(x, type, batch, token, head), x.token * size_of(type), n, width * size_of(type));
}

// A contiguous tensor [batch, tokens, heads, width].
inline Tensor contiguous(const void* at, Int tokens, Int heads, Int width) {
    return {at, tokens * heads * width, heads * width, width};
}

// Advises huge pages for a result [batches, tokens, heads, width].
template <typename Problem>
inline void advise_huge_pages(const Problem& x, const void* result, Int tokens, Int heads, Int width) {
    const Int batches = x.offsets ? 1 : x.sequences;
    advise_huge_pages(result, batches * tokens * heads * width * size_of(x.type));
}

// Whether rows of `width` elements need no copy, being floats in whole vectors.
inline bool usable(Int type, Int width) { return type == FLOAT32 && width % WIDTH == 0; }

inline void read_rows(const Tensor& x, Int type, Int batch, Int token, Int head, Int n, Int width, Rows to) {
    for (Int i = 0; i < n; ++i)
        read_row(type, address(x, type, batch, token + i, head), width, to.data + i * to.row);
}

inline void scale_row(float* row, Int n, float factor) {
    for (Int i = 0; i < n; i += WIDTH) store(row + i, load(row + i) * broadcast(factor));
}

// Rows of one head as floats in whole vectors: in place if possible, otherwise copied, and mapped to
// features.
class HeadRows {
  public:
    HeadRows(Int type, Int width, Int most, Workspace& memory, bool copy = false,
             int32_t feature_map = IDENTITY_FEATURES)
        : type_(type),
          width_(width),
          feature_map_(feature_map),
          direct_(usable(type, width) && !copy && feature_map == IDENTITY_FEATURES) {
        buffer_ = memory.rows(most, round_up(width));
    }

    Rows read(const Tensor& x, Int batch, Int token, Int head, Int n) const {
        if (direct_ && n % 4 == 0)  // `transpose` reads four rows at a time
            return {(float*)address(x, type_, batch, token, head), x.token};
        read_rows(x, type_, batch, token, head, n, width_, buffer_);
        for (Int i = 0; i < n; ++i) make_features(feature_map_, width_, row(buffer_, i));
        return buffer_;
    }

  private:
    Int type_, width_;
    int32_t feature_map_;
    bool direct_;
    Rows buffer_;
};

inline float dot(const float* a, const float* b, Int n) {
    Vec total{};
    for (Int i = 0; i < n; i += WIDTH) total += load(a + i) * load(b + i);
    return sum(total);
}

// The same in double precision.
inline double exact_dot(const float* a, const float* b, Int n) {
    DoubleVec total{};
    for (Int i = 0; i < n; i += DOUBLES) total += load_widened(a + i) * load_widened(b + i);
    return sum(total);
}

// Calls `f(head)` for the query heads that read key head `group`.
template <typename Problem, typename F>
inline void for_heads(const Problem& x, Int group, F&& f) {
    const Int per_group = x.heads / x.groups;
    for (Int h = group * per_group; h < (group + 1) * per_group; ++h) f(h);
}

// Whether a divisor is large enough to divide by. If not, there is nothing to attend to, and the output is 0,
// whatever the numerator. NaN passes, and stays NaN.
inline bool divisible(float divisor) { return !(__builtin_fabsf(divisor) < __FLT_MIN__ / __FLT_EPSILON__); }

inline void divide_row(float* row, Int n, float divisor) {
    if (divisible(divisor)) scale_row(row, n, 1 / divisor);
    else std::memset(row, 0, (size_t)n * 4);
}

// B = A^T for A [rows, cols], in squares of 4 x 4: both sizes are rounded up to a multiple of four.
inline void transpose(Int rows, Int cols, const float* a, Int a_row, Rows b) {
    for (Int i = 0; i < rows; i += 4)
        for (Int j = 0; j < cols; j += 4) {
            const float* from = a + i * a_row + j;
            float* to = b.data + j * b.row + i;
            const Quad a0 = *(const UnalignedQuad*)from, a1 = *(const UnalignedQuad*)(from + a_row);
            const Quad a2 = *(const UnalignedQuad*)(from + 2 * a_row),
                       a3 = *(const UnalignedQuad*)(from + 3 * a_row);
            const Quad b0 = __builtin_shufflevector(a0, a1, 0, 4, 1, 5);
            const Quad b1 = __builtin_shufflevector(a0, a1, 2, 6, 3, 7);
            const Quad b2 = __builtin_shufflevector(a2, a3, 0, 4, 1, 5);
            const Quad b3 = __builtin_shufflevector(a2, a3, 2, 6, 3, 7);
            *(UnalignedQuad*)to = __builtin_shufflevector(b0, b2, 0, 1, 4, 5);
            *(UnalignedQuad*)(to + b.row) = __builtin_shufflevector(b0, b2, 2, 3, 6, 7);
            *(UnalignedQuad*)(to + 2 * b.row) = __builtin_shufflevector(b1, b3, 0, 1, 4, 5);
            *(UnalignedQuad*)(to + 3 * b.row) = __builtin_shufflevector(b1, b3, 2, 3, 6, 7);
        }
}

}  // namespace UNROLLED_ISA
