// The elementwise feature maps phi of linear attention, applied to rows of queries and keys as they are read,
// and their derivatives.
#pragma once

#include "functions.h"

namespace UNROLLED_ISA {

// Replaces `n` elements x by phi(x), and those up to a whole vector by 0. NaN stays NaN.
inline void make_features(int32_t map, int64_t n, float* at) {
    if (map == IDENTITY_FEATURES) return;
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Vec x = load(at + i);
        const IntVec negative = x < Vec{};
        if (map == ELU_FEATURES) store(at + i, elu_plus_one(x));
        else if (map == RELU_FEATURES) store(at + i, select(negative, Vec{}, x));
        else store(at + i, select(negative, Vec{}, x * x));
    }
    for (int64_t i = n; i < round_up(n); ++i) at[i] = 0;
}

// Turns the gradient of `n` features phi(x) into that of x. The features alone say what the derivative is:
// min(phi, 1) for elu + 1, whether phi > 0 for relu, and 2 sqrt(phi) for its square.
inline void unmap_gradient(int32_t map, int64_t n, const float* features, float* gradient) {
    for (int64_t i = 0; i < n && map != IDENTITY_FEATURES; i += WIDTH) {
        const Vec y = load(features + i), g = load(gradient + i);
        if (map == ELU_FEATURES) store(gradient + i, select(y > broadcast(1), g, g * y));
        else if (map == RELU_FEATURES) store(gradient + i, select(y <= Vec{}, Vec{}, g));
        else {
            Vec root;
            for (int lane = 0; lane < WIDTH; ++lane) root[lane] = __builtin_sqrtf(y[lane]);
            store(gradient + i, broadcast(2) * root * g);
        }
    }
}

}  // namespace UNROLLED_ISA
