// What Python hands over: plain structs that `ops/kernels/native.py` mirrors field by field.
#pragma once

#include <cstdint>

// What a kernel returns.
enum [[nodiscard]] Status : int32_t { SUCCESS, OUT_OF_MEMORY };

enum Type : int32_t { FLOAT32, BFLOAT16, FLOAT16 };

// A tensor [batch, tokens, heads, width] whose last axis is contiguous; strides in elements.
struct Tensor {
    const void* data;
    int64_t batch, token, head;
};

// Linear attention over sequences; causal has as many queries as keys. With `offsets [sequences + 1]` they
// lie one after the other in a batch of one. Everything but q, k, v and their gradients is contiguous.
struct Linear {
    int64_t sequences, queries, keys, heads, groups, features, values;
    int32_t type, causal, normalize, threads;
    const int32_t* offsets;
    Tensor q, k, v;
    const double* log_decay;  // [batch, keys, groups], or null
    const float *kv, *k_sum;  // the state before: [sequences, groups, features, values] and without values
};

struct LinearOutputs {
    void* o;            // [batch, queries, heads, values]
    float *kv, *k_sum;  // the state after
    float* divisor;     // [batch, queries, heads], or null
};

struct LinearGradients {
    Tensor o;  // what arrives
    const float *kv, *k_sum, *divisor;
    void *d_q, *d_k, *d_v;  // what leaves, contiguous, in the type of the inputs
    double* d_log_decay;
    float *d_kv, *d_k_sum;
    float *d_divisor, *read;  // scratch [batch, queries, heads]; `read` only with gates
    float* states;            // scratch for every state between chunks, only with gates
};

enum FeatureMap : int32_t {
    IDENTITY_FEATURES,
    ELU_FEATURES,
    RELU_FEATURES,
    SQUARED_RELU_FEATURES
};  // what q and k go through first

struct LinearStep {
    int64_t batch, heads, groups, features, values;
    int32_t type, normalize, threads, feature_map;
    Tensor q, k, v;           // [batch, heads, width], without a token axis
    const double* log_decay;  // [batch, groups], or null
    const float *kv, *k_sum;
    void* o;
    float *kv_after, *k_sum_after;
};

// Sliding-window attention: query i of T reads the keys j of S with i + S - T - left <= j <= i + S - T +
// right. Neither side is longer than the keys or the queries. `offsets` as above.
struct Window {
    int64_t sequences, queries, keys, heads, groups, features, values, left, right;
    int32_t type, threads;
    double scale;
    const int32_t* offsets;
    const uint8_t* padding;  // [batch, keys], 1 for a key that is not read; or null
    Tensor q, k, v;
};

struct WindowOutputs {
    void* o;     // [batch, queries, heads, values]
    float* lse;  // [batch, queries, heads]
};

struct WindowGradients {
    Tensor o;  // what arrives
    const float *d_lse, *lse;
    void *d_q, *d_k,
        *d_v;  // what leaves, contiguous; d_k and d_v are zeros, and stay so where no query reads
};

struct Dense {
    int64_t rows, inputs, outputs;
    int32_t type, threads;
    const void *x, *weights, *bias;  // [rows, inputs], [outputs, inputs], [outputs] or null; contiguous
    void* y;                         // [rows, outputs]
};

enum Activation : int32_t { GELU, RELU, SWIGLU };

struct Norm {
    const float *weight, *bias;  // bias may be null
};

struct Layer {
    const float *weights, *bias;  // bias may be null
};

// A transformer block with linear attention. Everything in floats, contiguous, and whole vectors of any
// instruction set wide.
struct TransformerBlock {
    int64_t width, hidden;  // of the residual stream, and between the two layers of the feed-forward one
    int64_t heads, groups, features, values;
    int32_t pre_norm, root_mean_square, activation, feature_map;
    float epsilon;
    Norm attention_norm, feed_forward_norm;
    Layer qkv, out, up, down;
};

// One token through blocks of the same width.
struct StackStep {
    int64_t batch, blocks;
    int32_t threads;
    const TransformerBlock* const* block;
    const float *const *kv, *const *k_sum;  // the states of the blocks
    float *const *kv_after, *const *k_sum_after;
    const float* x;  // [batch, width]
    float* y;
};
