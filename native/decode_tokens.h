// The instructions of a program that need one token only.
//
// EMBED: to = row `token` of the table `weights` [ids, n], which is in bfloat16 if the kind is 1.
// ADD_POSITIONS: to += row `position` of the table `weights` [positions, n].
// ADD_SINUSOIDS: to = scale * to + [sin a_0, cos a_0, sin a_1 ..], a_i = position * frequencies_i, i < n / 2.
// ANGLES: to = [cos a_0 .. cos a_(n-1), sin a_0 .. sin a_(n-1)], a_i as above.
// NORMALIZE: to = (x - mean) / sqrt(variance + epsilon) weights + bias for each of `heads` parts x of n
// numbers of `first`; the mean is subtracted if the kind is 1, else taken as 0.
// LINEAR_BY_HEAD: to = x W_h + bias_h for each head x of `first`; W_h [n, features].
// APPLY: to = f(first + bias) * weights * scale * second for n numbers; the `kind` is the function f.
// ADD: to = first + second for n numbers.
// SCALE_HEADS: to = first * second_h for each of `heads` parts of n numbers.
// ROTATE: rotates the pairs (x_2i, x_2i+1), i < n, of each head's `features` numbers by the angles at
// `second`.
// FEATURES: features of each head, see `map_features`.
// MIXTURE: to = log-probabilities of n levels under a mixture of `heads` logistic distributions, whose
// weights, means and logarithms of scales are at `first`.
#pragma once

#include "functions.h"
#include "rows.h"

namespace UNROLLED_ISA {

// One token on its way through a program.
struct TokenRow {
    float* at;  // its scratch memory
    Int token, position;

    float* to(const Instruction& i) const { return at + i.to; }
    const float* from(const Instruction& i) const { return at + i.first; }
};

inline void embed(const Instruction& x, const TokenRow& t) {
    const Int first = t.token * x.n;
    if (x.kind == 1) read_row<BFLOAT16>((const uint16_t*)x.weights + first, x.n, t.to(x));
    else std::memcpy(t.to(x), x.weights + first, (size_t)x.n * 4);
}

inline void add_sinusoids(const Instruction& x, const TokenRow& t) {
    for (Int i = 0; i < x.n / 2; ++i) {
        const double angle = (double)t.position * x.frequencies[i];
        float* y = t.to(x) + 2 * i;
        y[0] = x.scale * y[0] + (float)__builtin_sin(angle);
        y[1] = x.scale * y[1] + (float)__builtin_cos(angle);
    }
}

inline void angles(const Instruction& x, const TokenRow& t) {
    for (Int i = 0; i < x.n; ++i) {
        const double angle = (double)t.position * x.frequencies[i];
        t.to(x)[i] = (float)__builtin_cos(angle);
        t.to(x)[x.n + i] = (float)__builtin_sin(angle);
    }
}

inline void normalize(const Instruction& x, const TokenRow& t) {
    for (Int head = 0; head < x.heads; ++head) {
        const Int first = head * x.n;
        const float* from = t.from(x) + first;
        float* to = t.to(x) + first;
        Vec total{}, squares{};
        for (Int i = 0; i < x.n && x.kind == 1; i += WIDTH) total += load_first(from + i, x.n - i);
        const float mean = sum(total) / (float)x.n;
        for (Int i = 0; i < x.n; i += WIDTH) {
            const Vec y = first_lanes(load_first(from + i, x.n - i) - broadcast(mean), x.n - i);
            squares += y * y;
        }
        const float scale = 1 / __builtin_sqrtf(sum(squares) / (float)x.n + x.epsilon);
        for (Int i = 0; i < x.n; i += WIDTH) {
            Vec y = (load_first(from + i, x.n - i) - broadcast(mean)) * broadcast(scale);
            if (x.weights) y *= load_first(x.weights + first + i, x.n - i);
            if (x.bias) y += load_first(x.bias + first + i, x.n - i);
            store_first(to + i, x.n - i, y);
        }
    }
}

inline void linear_by_head(const Instruction& x, const TokenRow& t) {
    const Int wide = x.features;
    for (Int head = 0; head < x.heads; ++head) {
        const float *from = t.from(x) + head * x.n, *w = x.weights + head * x.n * wide;
        if (wide == 1) {  // lanes over the inputs, since one output fills no vector
            Vec products{};
            for (Int i = 0; i < x.n; i += WIDTH)
                products += load_first(from + i, x.n - i) * load_first(w + i, x.n - i);
            t.to(x)[head] = sum(products) + (x.bias ? x.bias[head] : 0);
            continue;
        }
        for (Int j = 0; j < wide; j += WIDTH) {
            Vec total = x.bias ? load_first(x.bias + head * wide + j, wide - j) : Vec{};
            for (Int i = 0; i < x.n; ++i)
                total += load_first(w + i * wide + j, wide - j) * broadcast(from[i]);
            store_first(t.to(x) + head * wide + j, wide - j, total);
        }
    }
}

inline void apply(const Instruction& x, const TokenRow& t) {
    const float* other = x.second < 0 ? nullptr : t.at + x.second;
    for (Int i = 0; i < x.n; i += WIDTH) {
        const Int left = x.n - i;
        Vec y = load_first(t.from(x) + i, left);
        if (x.bias) y += load_first(x.bias + i, left);
        y = value_of(x.kind, y);
        if (x.weights) y *= load_first(x.weights + i, left);
        if (other) y *= load_first(other + i, left);
        store_first(t.to(x) + i, left, y * broadcast(x.scale));
    }
}

inline void add(const Instruction& x, const TokenRow& t) {
    for (Int i = 0; i < x.n; i += WIDTH)
        store_first(t.to(x) + i, x.n - i,
                    load_first(t.from(x) + i, x.n - i) + load_first(t.at + x.second + i, x.n - i));
}

inline void scale_heads(const Instruction& x, const TokenRow& t) {
    for (Int head = 0; head < x.heads; ++head) {
        const Vec factor = broadcast(t.at[x.second + head]);
        const float* from = t.from(x) + head * x.n;
        float* to = t.to(x) + head * x.n;
        for (Int i = 0; i < x.n; i += WIDTH)
            store_first(to + i, x.n - i, load_first(from + i, x.n - i) * factor);
    }
}

inline void rotate(const Instruction& x, const TokenRow& t) {
    const float *cos = t.at + x.second, *sin = cos + x.n;
    for (Int head = 0; head < x.heads; ++head) {
        const float* from = t.from(x) + head * x.features;
        float* to = t.to(x) + head * x.features;
        for (Int i = 0; i < x.n; ++i) {
            const float even = from[2 * i], odd = from[2 * i + 1];
            to[2 * i] = even * cos[i] - odd * sin[i];
            to[2 * i + 1] = even * sin[i] + odd * cos[i];
        }
        for (Int i = 2 * x.n; i < x.features; ++i) to[i] = from[i];
    }
}

// y = exp(x - most) for n numbers, and their sum.
inline float exponentials(const float* x, Int n, float most, float* y) {
    Vec total{};
    for (Int i = 0; i < n; i += WIDTH) {
        const Vec e = first_lanes(exp(load_first(x + i, n - i) - broadcast(most)), n - i);
        store_first(y + i, n - i, e);
        total += e;
    }
    return sum(total);
}

inline float most_of(const float* x, Int n) {
    float most = x[0];
    Int i = 1;
    if (n > WIDTH) {
        Vec lanes = load(x);
        for (i = WIDTH; i + WIDTH <= n; i += WIDTH) lanes = max(lanes, load(x + i));
        for (int lane = 0; lane < WIDTH; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
    }
    for (; i < n; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

// Features y of the n numbers x of a head:
//
// EXP_OF_QUERIES: exp(x - max x), with exponents of at least -scale.
// EXP_OF_KEYS: exp(x), with exponents from -scale to scale.
// PROBABILITIES: softmax(x).
// WITH_NEGATIVES: [x, -x].
// WAVES: [sin x, cos x] scale.
// NEIGHBOURS: the products of DPFP, u_i u_(i - j) for j = 1 .. `window`, with u = [relu(x), relu(-x)].
// PAIRS: x is multiplied by w_0, w = `weights`; then [w_1, w_2 x, w_3 x_i x_j], i <= j, the last times
// sqrt(2) where i < j.
// BY_POSITION: [x cos a, x sin a] with a = position frequencies_0.
inline void map_features(const Instruction& x, const float* from, Int position, float* to) {
    const Int n = x.n;
    if (x.kind == EXP_OF_QUERIES || x.kind == EXP_OF_KEYS) {
        const Vec most = broadcast(x.kind == EXP_OF_QUERIES ? most_of(from, n) : 0);
        const Vec high = broadcast(x.scale), low = broadcast(-x.scale);
        for (Int i = 0; i < n; i += WIDTH) {
            const Vec y = load_first(from + i, n - i) - most;
            store_first(to + i, n - i, exp(select(y > high, high, select(y < low, low, y))));
        }
    }
    if (x.kind == PROBABILITIES) {
        const float total = exponentials(from, n, most_of(from, n), to);
        for (Int i = 0; i < n; ++i) to[i] /= total;
    }
    if (x.kind == WITH_NEGATIVES)
        for (Int i = 0; i < n; ++i) to[i] = from[i], to[n + i] = -from[i];
    if (x.kind == WAVES)
        for (Int i = 0; i < n; ++i)
            to[i] = x.scale * __builtin_sinf(from[i]), to[n + i] = x.scale * __builtin_cosf(from[i]);
    if (x.kind == NEIGHBOURS) {
        const auto relu = [&](Int i) {
            const float y = i < n ? from[i] : -from[i - n];
            return y < 0 ? 0 : y;
        };
        for (Int j = 1; j <= x.window; ++j)
            for (Int i = 0; i < 2 * n; ++i) *to++ = relu(i) * relu((i - j + 2 * n) % (2 * n));
    }
    if (x.kind == PAIRS) {
        const float* w = x.weights;
        *to++ = w[1];
        for (Int i = 0; i < n; ++i) *to++ = w[2] * (w[0] * from[i]);
        for (Int i = 0; i < n; ++i)
            for (Int j = i; j < n; ++j)
                *to++ = w[3] * (i == j ? 1 : 1.41421356f) * (w[0] * from[i]) * (w[0] * from[j]);
    }
    if (x.kind == BY_POSITION) {
        const double angle = (double)position * x.frequencies[0];
        const float cos = (float)__builtin_cos(angle), sin = (float)__builtin_sin(angle);
        for (Int i = 0; i < n; ++i) to[i] = from[i] * cos, to[n + i] = from[i] * sin;
    }
}

inline void features(const Instruction& x, const TokenRow& t) {
    for (Int head = 0; head < x.heads; ++head)
        map_features(x, t.from(x) + head * x.n, t.position, t.to(x) + head * x.features);
}

// The logarithms of the probabilities of the levels, as `LogisticMixture` in Python computes them: in units
// in which neighbouring levels are 2 apart, so that level l is at 2 l - span. The lowest level reaches down
// to -inf, the highest up to +inf. `second` is scratch memory: (WIDTH + 4) numbers for each component.
inline void mixture(const Instruction& x, const TokenRow& t) {
    const Int K = x.heads, span = x.n - 1;
    const float *weight = t.from(x), *mean = weight + K, *log_scale = mean + K;
    struct Component {
        float log_weight, mean, inverse_scale, log_width;
    }* const component = (Component*)(t.at + x.second);
    float* const terms = t.at + x.second + 4 * K;
    const float most = most_of(weight, K);
    float total = 0;
    for (Int k = 0; k < K; ++k) total += __builtin_expf(weight[k] - most);
    for (Int k = 0; k < K; ++k) {
        const float log_s =
            (log_scale[k] < x.epsilon ? x.epsilon : log_scale[k]) + __builtin_logf((float)span);
        // log(1 - e^-d) for the width d = 2 / s, as log d + log((1 - e^-d) / d)
        const float log_d = 0.693147181f - log_s, d = __builtin_fmaxf(__builtin_expf(log_d), 1e-15f);
        component[k] = {weight[k] - most - __builtin_logf(total), (float)span * mean[k],
                        __builtin_expf(-log_s), log_d + __builtin_logf(-__builtin_expm1f(-d) / d)};
    }
    for (Int level = 0; level < x.n; level += WIDTH) {
        Vec at, highest = broadcast(-__builtin_inff()), sums{};
        for (int lane = 0; lane < WIDTH; ++lane) at[lane] = (float)(2 * (level + lane) - span);
        const IntVec first = at == broadcast((float)-span), last = at == broadcast((float)span);
        for (Int k = 0; k < K; ++k) {
            const Component& c = component[k];
            const Vec centred = at - broadcast(c.mean), inverse = broadcast(c.inverse_scale);
            const Vec above = Vec{} - softplus((centred - broadcast(1)) * inverse),
                      below = Vec{} - softplus((Vec{} - centred - broadcast(1)) * inverse);
            const Vec term = broadcast(c.log_weight) + select(first, Vec{}, above) +
                             select(last, Vec{}, below) + select(first | last, Vec{}, broadcast(c.log_width));
            store(terms + k * WIDTH, term);
            highest = max(highest, term);
        }
        for (Int k = 0; k < K; ++k) sums += exp(load(terms + k * WIDTH) - highest);
        Vec y;
        for (int lane = 0; lane < WIDTH; ++lane) y[lane] = highest[lane] + __builtin_logf(sums[lane]);
        store_first(t.to(x) + level, x.n - level, y);
    }
}

}  // namespace UNROLLED_ISA
