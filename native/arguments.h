// The arguments of the kernels. This is their only declaration: the library holds this text, from which the
// module `structs` packs them in Python. A field has type int32_t, int64_t, float, double, a pointer, or a
// struct declared above it.
#pragma once

#include <cstdint>

// What a kernel returns.
enum [[nodiscard]] Status : int32_t { SUCCESS, OUT_OF_MEMORY };

enum Type : int32_t { FLOAT32, BFLOAT16, FLOAT16 };

// Applied to the queries and keys of linear attention.
enum FeatureMap : int32_t { IDENTITY_FEATURES, ELU_FEATURES, RELU_FEATURES, SQUARED_RELU_FEATURES };

// A tensor [batch, tokens, heads, width] whose last axis is contiguous; strides in elements.
struct Tensor {
    const void* data;
    int64_t batch, token, head;
};

// Linear attention over sequences. Causal attention has as many queries as keys. With `offsets [sequences +
// 1]` the sequences are packed into a batch of one. All arrays but q, k, v and their gradients are
// contiguous. With `rates` it is the delta rule, which is causal and has no divisor.
struct Linear {
    int64_t sequences, queries, keys, heads, groups, features, values;
    int32_t type, causal, normalize, threads;
    const int32_t* offsets;
    Tensor q, k, v;
    const double* log_decay;  // [batch, keys, groups], or null
    const float* rates;       // [batch, keys, groups], or null
    const float *kv, *k_sum;  // initial state: [sequences, groups, features, values] and without values
    // If the first is above 0, queries and keys x are read as x / sqrt(|x|^2 + unit_epsilon), queries also
    // times `query_scale`. Only forward.
    float unit_epsilon, query_scale;
    int32_t feature_map;  // applied to q and k; not with rates
};

struct LinearOutputs {
    void* o;            // [batch, queries, heads, values]
    float *kv, *k_sum;  // final state; no k_sum with rates
    float* divisor;     // [batch, queries, heads], or null
};

struct LinearGradients {
    Tensor o;                             // gradient of the output
    const float *kv, *k_sum;              // gradients of the final state
    const float* divisor;                 // of the forward pass
    void *d_q, *d_k, *d_v;                // results, contiguous, in the type of the inputs
    double* d_log_decay;                  // only with gates
    float* d_rates;                       // only with rates
    float *d_kv, *d_k_sum;                // gradients of the initial state
    float *d_divisor, *d_log_from_start;  // scratch [batch, queries, heads]; the second only with gates
    float* states;                        // scratch of `linear_saved_floats` floats, with gates or rates
    float* residuals;                     // scratch [batch, keys, groups, values], only with rates
};

// Linear attention with a decay for every feature: causal, without a divisor. `offsets` as in `Linear`. With
// `rates` it is the delta rule.
struct Gla {
    int64_t sequences, queries, keys, heads, groups, features, values;  // as many queries as keys
    int32_t type, threads;
    const int32_t* offsets;
    Tensor q, k, v;
    Tensor log_decay;    // floats [batch, keys, groups, features]
    const float* rates;  // [batch, keys, groups], or null
    const float* state;  // before the first token, [sequences, groups, features, values]
};

struct GlaOutputs {
    void* o;       // [batch, queries, heads, values]
    float* state;  // after the last token
};

struct GlaGradients {
    Tensor o;                      // gradient of the output
    const float* state;            // gradient of the final state
    void *d_q, *d_k, *d_v;         // results, contiguous, in the type of the inputs
    float *d_log_decay, *d_state;  // results, contiguous
    float* d_rates;                // only with rates
    float* residuals;              // scratch [batch, keys, groups, values], only with rates
};

struct LinearStep {
    int64_t batch, heads, groups, features, values;
    int32_t type, normalize, threads, feature_map;
    Tensor q, k, v;                  // [batch, heads, width], without an axis of tokens
    const double* log_decay;         // [batch, groups], or null
    const float* feature_log_decay;  // [batch, groups, features] in its place, or null
    const float* rates;              // [batch, groups], or null
    const float *kv, *k_sum;         // state before; k_sum is null without a divisor
    void* o;                         // [batch, heads, values]
    float *kv_after, *k_sum_after;
};

// Sliding-window attention: query i of T attends to the keys j of S with
// i + S - T - left <= j <= i + S - T + right, where left <= S and right <= T. `offsets` as in `Linear`.
struct Window {
    int64_t sequences, queries, keys, heads, groups, features, values, left, right;
    int32_t type, threads;
    double scale;
    const int32_t* offsets;
    const uint8_t* padding;  // [batch, keys], 1 for a padded key; or null
    Tensor q, k, v;
};

struct WindowOutputs {
    void* o;     // [batch, queries, heads, values]
    float* lse;  // [batch, queries, heads]
};

struct WindowGradients {
    Tensor o;                  // gradient of the output
    const float *d_lse, *lse;  // gradient of lse, and lse of the forward pass
    void *d_q, *d_k, *d_v;     // results, contiguous; rows of d_k and d_v that no query reads are not written
};

// Causal convolution of every channel with its own taps: y_t = sum_l weight_l * x_(t-l). The inputs before
// the first token are those of the state. `offsets` as in `Linear`.
struct Conv {
    int64_t sequences, tokens, channels, taps;
    int32_t type, threads;
    const int32_t* offsets;
    Tensor x;             // [batch, tokens, channels], without an axis of heads
    const float* weight;  // [taps, channels], the current token's first
    const float* state;   // [sequences, taps - 1, channels], the latest input last
};

struct ConvOutputs {
    void* y;       // [batch, tokens, channels]
    float* state;  // after the last token
};

struct ConvGradients {
    Tensor y;  // gradient of the output
    const float* state;
    void* d_x;
    float* d_weight;
    float* d_state;  // gradient of the initial state
};

// Linear layer y = x W^T + b. All arrays are contiguous.
struct Dense {
    int64_t rows, inputs, outputs;
    int32_t type, threads;
    const void *x, *weights, *bias;  // [rows, inputs], [outputs, inputs], [outputs] or null
    void* y;                         // [rows, outputs]
};

enum Activation : int32_t { GELU, RELU, SWIGLU };

struct Norm {
    const float *weight, *bias;  // bias may be null
};

struct Layer {
    const float *weights, *bias;  // bias may be null
};

// A transformer block with linear attention. Arrays are contiguous floats; widths are multiples of 16, so
// whole vectors of every instruction set.
struct TransformerBlock {
    int64_t width, hidden;  // of the residual stream and of the feed-forward layer
    int64_t heads, groups, features, values;
    int32_t pre_norm, root_mean_square, activation, feature_map;
    float epsilon;
    Norm attention_norm, feed_forward_norm;
    Layer qkv, out, up, down;
};

// One token through blocks of the same width. Of each block: its description, its state before and after.
struct StackStep {
    int64_t batch, blocks;
    int32_t threads;
    const TransformerBlock* const* block;
    const float *const *kv, *const *k_sum;
    float *const *kv_after, *const *k_sum_after;
    const float* x;  // [batch, width]
    float* y;
};
