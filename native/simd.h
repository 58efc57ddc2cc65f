// Vectors of floats as wide as the instruction set that this file is compiled for, by the vector extensions
// that GCC and Clang share. All code that depends on the instruction set is in a namespace of its own. It
// uses no template of the C++ standard library: the linker would merge the copies of such a template, and
// might keep one that this machine cannot run.
#pragma once

#include <cstdint>
#include <cstring>

#include "arguments.h"

namespace UNROLLED_ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t IntVec __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t BitVec __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(WIDTH * 2)));

// The same without alignment, allowed to alias any type.
typedef float UnalignedVec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint16_t UnalignedHalfVec __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));

// x - 0, which the compiler may drop. It may not drop x + 0, which turns -0 into 0.
inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec load(const float* at) { return *(const UnalignedVec*)at; }

inline void store(float* at, Vec x) { *(UnalignedVec*)at = x; }

inline Vec select(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }

inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

typedef float Quad __attribute__((vector_size(16)));
typedef float UnalignedQuad __attribute__((vector_size(16), aligned(4), may_alias));

inline float sum(Vec x) {
    Quad parts[WIDTH / 4];
    std::memcpy(parts, &x, sizeof x);
    for (int n = WIDTH / 8; n; n /= 2)
        for (int i = 0; i < n; ++i) parts[i] += parts[i + n];
    const Quad pairs = parts[0] + __builtin_shufflevector(parts[0], parts[0], 2, 3, 0, 1);
    return pairs[0] + pairs[1];
}

inline float largest_lane(Vec x) {
    Quad parts[WIDTH / 4];
    std::memcpy(parts, &x, sizeof x);
    for (int n = WIDTH / 8; n; n /= 2)
        for (int i = 0; i < n; ++i) parts[i] = parts[i] > parts[i + n] ? parts[i] : parts[i + n];
    const Quad other = __builtin_shufflevector(parts[0], parts[0], 2, 3, 0, 1),
               pairs = parts[0] > other ? parts[0] : other;
    return pairs[0] > pairs[1] ? pairs[0] : pairs[1];
}

inline int32_t largest(IntVec x) {
    typedef int32_t Four __attribute__((vector_size(16)));
    const auto larger = [](Four a, Four b) { return a > b ? a : b; };
    Four parts[WIDTH / 4];
    std::memcpy(parts, &x, sizeof x);
    for (int n = WIDTH / 8; n; n /= 2)
        for (int i = 0; i < n; ++i) parts[i] = larger(parts[i], parts[i + n]);
    const Four pairs = larger(parts[0], __builtin_shufflevector(parts[0], parts[0], 2, 3, 0, 1));
    return pairs[0] > pairs[1] ? pairs[0] : pairs[1];
}

// Doubles in a register, half as many as floats.
constexpr int DOUBLES = WIDTH / 2;
typedef double DoubleVec __attribute__((vector_size(WIDTH * 4)));
typedef double UnalignedDoubleVec __attribute__((vector_size(WIDTH * 4), aligned(8), may_alias));
typedef float UnalignedFloats __attribute__((vector_size(WIDTH * 2), aligned(4), may_alias));

inline DoubleVec broadcast_double(double x) { return x - DoubleVec{}; }
inline DoubleVec load_doubles(const double* at) { return *(const UnalignedDoubleVec*)at; }
inline void store_doubles(double* at, DoubleVec x) { *(UnalignedDoubleVec*)at = x; }
inline DoubleVec load_widened(const float* at) {
    return __builtin_convertvector(*(const UnalignedFloats*)at, DoubleVec);
}
inline void store_narrowed(float* at, DoubleVec x) {
    *(UnalignedFloats*)at = __builtin_convertvector(x, UnalignedFloats);
}

inline double sum(DoubleVec x) {
    double total = 0;
    for (int i = 0; i < DOUBLES; ++i) total += x[i];
    return total;
}

inline int64_t round_up(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

constexpr float LOWEST_NORMAL_EXPONENT = -87.3f, LOWEST_SUBNORMAL_EXPONENT = -104;

// e^x to about one unit in the last place; 0 below `lowest`, by default where the result would be subnormal.
inline Vec exp(Vec x, float lowest = LOWEST_NORMAL_EXPONENT) {
    const IntVec tiny = x < broadcast(lowest);
    x = select(tiny, Vec{}, select(x > broadcast(88.7f), broadcast(88.7f), x));
    // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to the nearest integer.
    const Vec shifted = x * broadcast(1.44269504f) + broadcast(12582912.0f);
    const Vec n = shifted - broadcast(12582912.0f);
    Vec r = x - n * broadcast(0.693145752f);
    r = r - n * broadcast(1.42860677e-6f);
    Vec y = broadcast(1.0f / 5040);
    constexpr float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    for (float c : taylor) y = y * r + broadcast(c);
    // 2^n in two factors: n may be 128 or -150, whose powers of two are not floats.
    const IntVec whole = __builtin_convertvector(n, IntVec), half = whole >> 1;
    y = y * (Vec)((half + 127) << 23) * (Vec)((whole - half + 127) << 23);
    return select(tiny, Vec{}, y);
}

// e^x of N vectors, to about two units in the last place for x <= 88, in half the time of `exp`. Each step is
// done for all vectors, so that operations that do not wait for each other are close together: a processor
// looks for them among the next few dozen only.
template <int N>
__attribute__((always_inline)) inline void exp_of_negative(Vec (&x)[N]) {
    Vec shifted[N], r[N], y[N];
    const auto each = [](auto&& step) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) step(j);
    };
    each([&](int j) { shifted[j] = x[j] * broadcast(1.44269504f) + broadcast(12582912.0f); });
    each([&](int j) { y[j] = shifted[j] - broadcast(12582912.0f); });
    each([&](int j) { r[j] = x[j] - y[j] * broadcast(0.693145752f); });
    each([&](int j) { r[j] = r[j] - y[j] * broadcast(1.42860677e-6f); });
    each([&](int j) { y[j] = broadcast(1.0f / 720); });
    constexpr float taylor[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    for (float c : taylor) each([&](int j) { y[j] = y[j] * r[j] + broadcast(c); });
    // The lowest bits of `shifted` are those of the integer that was subtracted.
    each([&](int j) { y[j] *= (Vec)(((BitVec)shifted[j] << 23) + (127u << 23)); });
    each([&](int j) { x[j] = select(x[j] < broadcast(LOWEST_NORMAL_EXPONENT), Vec{}, y[j]); });
}

__attribute__((always_inline)) inline Vec exp_of_negative(Vec x) {
    Vec one[] = {x};
    exp_of_negative(one);
    return one[0];
}

// 16-bit lanes to floats, and back with rounding to nearest even.
template <Type type>
inline Vec widen(HalfVec x) {
    BitVec bits = __builtin_convertvector(x, BitVec);
    if (type == BFLOAT16) return (Vec)(bits << 16);
    const BitVec sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    // Exponent and mantissa are shifted into place; the product corrects the bias and normalises subnormals.
    Vec value = (Vec)(rest << 13) * broadcast(0x1p112f);
    value = select((IntVec)(rest >= 0x7c00), (Vec)((rest << 13) | 0x7f800000), value);
    return (Vec)((BitVec)value | sign);
}

template <Type type>
inline HalfVec narrow(Vec x) {
    const BitVec bits = (BitVec)x;
    if (type == BFLOAT16) {
        const BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const BitVec nan = (bits >> 16) | 0x40;
        return __builtin_convertvector((BitVec)select(x == x, (Vec)rounded, (Vec)nan), HalfVec);
    }
    const BitVec sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    const BitVec normal = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    const BitVec subnormal = (BitVec)((Vec)rest + broadcast(0.5f)) - 0x3f000000;  // rounds at 2^-24
    BitVec y = (BitVec)select((IntVec)(rest < 0x38800000), (Vec)subnormal, (Vec)normal);
    y = (BitVec)select((IntVec)(rest >= 0x477ff000), broadcast(0) + (Vec)(BitVec{} + 0x7c00), (Vec)y);
    y = (BitVec)select((IntVec)(rest > 0x7f800000), (Vec)(BitVec{} + 0x7e00), (Vec)y);
    return __builtin_convertvector(y | sign, HalfVec);
}

}  // namespace UNROLLED_ISA
