// Elementwise functions of vectors.
#pragma once

#include "simd.h"

namespace UNROLLED_ISA {

// x times the normal distribution function, 1 - erfc(x / sqrt 2) / 2. With t = 1 / (1 + 0.45 z), erfc(z)
// exp(z^2) is t times a polynomial in t, fitted to a relative error of 4e-8. For x < 0 the tail is computed
// directly, so that nothing cancels.
inline Vec gelu(Vec x) {
    const IntVec negative = x < Vec{};
    const Vec z = select(negative, Vec{} - x, x) * broadcast(0.707106781f);
    const Vec t = broadcast(1) / (broadcast(1) + broadcast(0.45f) * z);
    constexpr float coefficients[] = {-0.0208304711f, 0.095888935f,  -0.151200205f, 0.0720099658f,
                                      -0.0115948254f, 0.0600995347f, 0.0876052976f, 0.114137575f,
                                      0.126941517f,   0.126942664f};
    Vec p = broadcast(coefficients[0]);
    for (int i = 1; i < 10; ++i) p = p * t + broadcast(coefficients[i]);
    const Vec tail = exp_of_negative(Vec{} - z * z) * t * p;
    return x * select(negative, tail, broadcast(1) - tail);
}

inline Vec sigmoid(Vec x) { return broadcast(1) / (broadcast(1) + exp(Vec{} - x)); }

// 1 - 2 / (e^2x + 1), and near 0, where that cancels, the odd polynomial.
inline Vec tanh(Vec x) {
    const Vec square = x * x;
    Vec p = broadcast(-17.0f / 315);
    constexpr float taylor[] = {2.0f / 15, -1.0f / 3, 1.0f};
    for (float c : taylor) p = p * square + broadcast(c);
    const Vec far = broadcast(1) - broadcast(2) / (exp(x + x) + broadcast(1));
    return select(square < broadcast(0.04f), x * p, far);
}

// log(1 + y) for y in [0, 1]: 2 artanh(s) with s = y / (2 + y) <= 1/3, whose series ends at s^15.
inline Vec log1p(Vec y) {
    const Vec s = y / (broadcast(2) + y), square = s * s;
    Vec p = broadcast(1.0f / 15);
    constexpr float series[] = {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
    for (float c : series) p = p * square + broadcast(c);
    return (s + s) * p;
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|).
inline Vec softplus(Vec x) {
    const Vec size = select(x < Vec{}, Vec{} - x, x);
    return max(x, Vec{}) + log1p(exp(Vec{} - size));
}

// elu(x) + 1, computed as e^x below 0.
inline Vec elu_plus_one(Vec x) {
    return select(x < Vec{}, exp(x, LOWEST_SUBNORMAL_EXPONENT), x + broadcast(1));
}

inline Vec value_of(int32_t function, Vec x) {
    switch (function) {
        case GELU:
            return gelu(x);
        case GELU_TANH:
            return x * broadcast(0.5f) *
                   (broadcast(1) + tanh(broadcast(0.797884561f) * (x + broadcast(0.044715f) * x * x * x)));
        case RELU:
            return select(x < Vec{}, Vec{}, x);
        case SQUARED_RELU:
            return select(x < Vec{}, Vec{}, x * x);
        case ELU_PLUS_ONE:
            return elu_plus_one(x);
        case TANH:
            return tanh(x);
        case SILU:
            return x * sigmoid(x);
        case SIGMOID:
            return sigmoid(x);
        case LOG_SIGMOID:
            return Vec{} - softplus(Vec{} - x);
        case SOFTPLUS:
            return softplus(x);
        case EXPONENTIAL:
            return exp(x);
        default:
            return x;
    }
}

// A function and its derivative.
struct Slope {
    Vec value, slope;
};

// Of silu or the logistic function.
inline Slope with_slope(int32_t function, Vec x) {
    const Vec e = exp_of_negative(select(x < Vec{}, x, Vec{} - x)), divisor = broadcast(1) + e;
    const Vec s = select(x < Vec{}, e, broadcast(1)) / divisor, rest = broadcast(1) - s;
    if (function == SIGMOID) return {s, s * rest};
    return {x * s, s * (broadcast(1) + x * rest)};
}

}  // namespace UNROLLED_ISA
