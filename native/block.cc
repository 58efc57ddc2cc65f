// One token through a whole transformer block with linear attention: what `models/blocks.py` computes in
// steps. A token is so little work that handing it back to Python between the layers would take longer than
// they do.
#include "kernels.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

// x times the normal distribution function, 1 - erfc(x / sqrt 2) / 2. erfc(z) exp(z^2) is t times a
// polynomial of t = 1 / (1 + 0.45 z), fitted to a relative error of 4e-8; below 0 the tail comes out of it
// undiminished.
Vec gelu(Vec x) {
    const IntVec negative = x < Vec{};
    const Vec z = select(negative, Vec{} - x, x) * broadcast(0.707106781f);
    const Vec t = broadcast(1) / (broadcast(1) + broadcast(0.45f) * z);
    constexpr float coefficients[] = {-0.0208304711f, 0.095888935f,  -0.151200205f, 0.0720099658f,
                                      -0.0115948254f, 0.0600995347f, 0.0876052976f, 0.114137575f,
                                      0.126941517f,   0.126942664f};
    Vec p = broadcast(coefficients[0]);
    for (int i = 1; i < 10; ++i) p = p * t + broadcast(coefficients[i]);
    const Vec tail = exp(Vec{} - z * z) * t * p;
    return x * select(negative, tail, broadcast(1) - tail);
}

Vec activate(Int activation, Vec x) {
    if (activation == GELU) return gelu(x);
    if (activation == SWIGLU) return x / (broadcast(1) + exp(Vec{} - x));
    return select(x < Vec{}, Vec{}, x);
}

// y = (x - mean) / sqrt(variance + epsilon) w + b for each row; root mean squares take the mean as 0.
void normalize(const BlockStep& b, const Norm& norm, const float* x, float* y) {
    const Int n = b.width;
    for (Int r = 0; r < b.attention.batch; ++r, x += n, y += n) {
        Vec total{}, squares{};
        for (Int i = 0; i < n && !b.root_mean_square; i += WIDTH) total += load(x + i);
        const Vec mean = broadcast(sum(total) / (float)n);
        for (Int i = 0; i < n; i += WIDTH) squares += (load(x + i) - mean) * (load(x + i) - mean);
        const Vec scale = broadcast(1 / __builtin_sqrtf(sum(squares) / (float)n + b.epsilon));
        for (Int i = 0; i < n; i += WIDTH) {
            const Vec bias = norm.bias ? load(norm.bias + i) : Vec{};
            store(y + i, (load(x + i) - mean) * scale * load(norm.weight + i) + bias);
        }
    }
}

void linear(const BlockStep& b, const Layer& layer, Int inputs, Int outputs, const float* x, float* y) {
    const LinearStep& a = b.attention;
    const Dense d{a.batch, inputs, outputs, FLOAT32, a.threads, x, layer.weights, layer.bias, y};
    EXPORTED(dense)(&d);
}

void add(Int n, const float* x, const float* y, float* sum) {
    for (Int i = 0; i < n; i += WIDTH) store(sum + i, load(x + i) + load(y + i));
}

void feed_forward(const BlockStep& b, const float* x, float* up, float* y) {
    const Int rows = b.attention.batch, n = b.hidden;
    const bool gated = b.activation == SWIGLU;
    linear(b, b.up, b.width, gated ? 2 * n : n, x, up);
    for (Int r = 0; r < rows; ++r) {
        const float* from = up + r * (gated ? 2 * n : n);  // with gates: those, then what they gate
        for (Int i = 0; i < n; i += WIDTH) {
            const Vec active = activate(b.activation, load(from + i));
            store(up + r * n + i, gated ? active * load(from + n + i) : active);
        }
    }
    linear(b, b.down, n, b.width, up, y);
}

void run(const BlockStep& b) {
    LinearStep a = b.attention;
    const Int D = a.features, wide = a.heads * D, narrow = a.groups * D, M = a.values;
    const Int qkv_width = wide + narrow + a.groups * M, n = a.batch * b.width;
    Workspace memory;
    float *qkv = memory.floats(a.batch * qkv_width), *o = memory.floats(a.batch * a.heads * M);
    float *normed = memory.floats(n), *added = memory.floats(n), *up = memory.floats(2 * a.batch * b.hidden);
    if (b.pre_norm) normalize(b, b.attention_norm, b.x, normed);
    linear(b, b.qkv, b.width, qkv_width, b.pre_norm ? normed : b.x, qkv);
    a.q = {qkv, qkv_width, 0, D};
    a.k = {qkv + wide, qkv_width, 0, D};
    a.v = {qkv + wide + narrow, qkv_width, 0, M};
    a.o = o;
    EXPORTED(linear_step)(&a);
    linear(b, b.out, a.heads * M, b.width, o, added);
    add(n, b.x, added, b.y);
    if (b.pre_norm) normalize(b, b.feed_forward_norm, b.y, normed);
    else normalize(b, b.attention_norm, b.y, b.y);
    feed_forward(b, b.pre_norm ? normed : b.y, up, added);
    add(n, b.y, added, b.y);
    if (!b.pre_norm) normalize(b, b.feed_forward_norm, b.y, b.y);
}

}  // namespace
}  // namespace UNROLLED_ISA

void EXPORTED(block_step)(const BlockStep* x) { UNROLLED_ISA::run(*x); }
