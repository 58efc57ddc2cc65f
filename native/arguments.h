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
    // If `unit_epsilon` is above 0, queries and keys x are read as x / sqrt(|x|^2 + unit_epsilon), and
    // queries are also multiplied by `query_scale`. Only in the forward pass.
    float unit_epsilon, query_scale;
    int32_t feature_map;  // applied to q and k; not with rates
    // With `rows`, q and k are `width` wide and mapped to exp(W y - |y|^2 / 2 - shift), y = x / width^(1/4).
    // The largest feature of a query is 1. The rows of both matrices are padded to a multiple of 16.
    int64_t width, row_heads;      // row_heads is 1 or groups
    const float* rows;             // W [row_heads, features, width], or null; with a divisor only
    const float* transposed_rows;  // [row_heads, width, features]
    const float* key_shift;        // [batch, keys, groups], at least the largest exponent of each key
};

// The largest exponent W y - |y|^2 / 2 of each key, [batch, keys, groups].
struct KeyPeaks {
    float* peak;
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
    double* d_log_decay;                  // null if not wanted
    float* d_rates;                       // only with rates
    float *d_kv, *d_k_sum;                // gradients of the initial state
    float *d_divisor, *d_log_from_start;  // scratch [batch, queries, heads]; the second only with d_log_decay
    float* states;     // scratch of `linear_saved_floats` floats, with d_log_decay or rates
    float* residuals;  // scratch [batch, keys, groups, values], only with rates
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

// The rule of a diagonal plus low rank: linear attention with a decay for every feature, where a token also
// writes a second value, at b: what a reads from the state before the token. `offsets` as in `Linear`.
struct Dplr {
    int64_t sequences, tokens, heads, features, values;
    int32_t type, threads;
    const int32_t* offsets;
    Tensor q, k, v, a, b;
    Tensor log_decay;    // floats [batch, tokens, heads, features]
    const float* state;  // before the first token, [sequences, heads, features, values]
};

struct DplrGradients {
    Tensor o;                           // gradient of the output
    const float* state;                 // gradient of the final state
    void *d_q, *d_k, *d_v, *d_a, *d_b;  // results, contiguous, in the type of the inputs
    float *d_log_decay, *d_state;       // results, contiguous
    float* reads;                       // scratch [batch, tokens, heads, values]
};

// The selective scan: for every channel and state h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t, and for every
// channel y_t, the sum of c_t h_t over the states. `offsets` as in `Linear`. No tensor has an axis of heads.
struct SelectiveScan {
    int64_t sequences, tokens, channels, states;
    int32_t type, threads;
    const int32_t* offsets;
    Tensor x, b, c;      // [batch, tokens, channels], and twice [batch, tokens, states]
    Tensor dt;           // floats [batch, tokens, channels], at least 0; `head` is the stride of the channels
    const float* a;      // [channels, states], at most 0
    const float* state;  // before the first token, [sequences, channels, states]
};

struct SelectiveScanOutputs {
    void* y;       // [batch, tokens, channels]
    float* state;  // after the last token
};

struct SelectiveScanGradients {
    Tensor y;                     // gradient of the output
    const float* state;           // gradient of the final state
    void *d_x, *d_b, *d_c;        // results, contiguous, in the type of the inputs
    float *d_dt, *d_a, *d_state;  // results, contiguous
};

// The weighted averages of RWKV-4: for every channel o_t = (exp(k_t + u) v_t + num) / (exp(k_t + u) + den),
// with the sums num and den over earlier tokens, which decay by exp(d) per token. A state has both times
// exp(-m), and m. `offsets` as in `Linear`. No tensor has an axis of heads.
struct Wkv {
    int64_t sequences, tokens, channels;
    int32_t type, threads;
    const int32_t* offsets;
    const uint8_t* padding;          // [batch, tokens], 1 for a padded token, which changes nothing; or null
    Tensor k, v;                     // [batch, tokens, channels], 0 at padding
    const float *log_decay, *bonus;  // d, at most 0, and u, [channels]
    const float* state;              // before the first token, [sequences, 3, channels]
};

struct WkvOutputs {
    void* o;       // [batch, tokens, channels]
    float* state;  // after the last token
};

struct WkvGradients {
    Tensor o;                                // gradient of the output
    const float* state;                      // gradient of the final state; that of m is not read
    void *d_k, *d_v;                         // results, contiguous, in the type of the inputs
    float *d_log_decay, *d_bonus, *d_state;  // results, contiguous
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

// Causal convolution of every channel with its own taps: y_t = f(bias + sum_l weight_l * x_(t-l)), where f is
// silu or the identity. The inputs before the first token are those of the state. `offsets` as in `Linear`.
struct Conv {
    int64_t sequences, tokens, channels, taps;
    int32_t type, activation, threads;  // activation: f is silu, else the identity
    const int32_t* offsets;
    Tensor x;             // [batch, tokens, channels], without an axis of heads
    const float* weight;  // [taps, channels], the current token's first
    const float* bias;    // [channels], or null
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
    float *d_weight, *d_bias;  // the latter may be null
    float* d_state;            // gradient of the initial state
};

// Rotary positions: turns each of the first pairs (x_2i, x_2i+1) of a head by its token's i-th angle, given
// as its cosine and sine. What follows the pairs is copied.
struct Rotary {
    int64_t rows, tokens, heads, width, pairs;
    int32_t type, threads, shared;  // shared: whether all rows of the batch have the angles of the first
    Tensor x;                       // [rows, tokens, heads, width]
    const float *cos, *sin;         // [rows, tokens, pairs], or [1, tokens, pairs] if shared
    void* y;                        // as x, contiguous
};

// Mixtures y_z = x + mu_z (other - x). All arrays are contiguous.
struct Mixtures {
    int64_t rows, channels, mixtures;
    int32_t type, mixed_type, threads;
    const void *x, *other;  // [rows, channels]
    const float* shares;    // mu, [mixtures, channels]
    void* const* mixed;     // y_z, or backward their gradients: the address of [rows, channels] for each
};

struct MixturesGradients {
    void *d_x, *d_other;  // in the type of x
    float* d_shares;
};

// Heads scaled to a length: n = f(x) * length / sqrt(|f(x)|^2 + eps), y = n * weight * g(gate).
struct HeadScale {
    int64_t rows, tokens, heads, width;
    int32_t type, gate_type, activation, gate_function, gate_first, threads;  // activation: f is silu
    float length, eps;
    Tensor x, gate;       // [rows, tokens, heads, width]; gate.data may be null, but not with gate_first
    const float* weight;  // [heads, width] or null
};

struct HeadScaleOutputs {
    float* y;  // [rows, tokens, heads, width]
};

struct HeadScaleGradients {
    const float* y;      // gradient of the output, contiguous
    void *d_x, *d_gate;  // in the types of x and the gate; d_gate is null without a gate
    float* d_weight;     // null without a weight
};

// Linear layer y = x W^T + b. All arrays are contiguous.
struct Dense {
    int64_t rows, inputs, outputs;
    int32_t type, threads;
    const void *x, *weights, *bias;  // [rows, inputs], [outputs, inputs], [outputs] or null
    void* y;                         // [rows, outputs]
};

// How the weights of a `Packed` matrix lie in memory; see `packed.h`.
enum Packing : int32_t { FLOAT32_TILES, BFLOAT16_TILES, INT8_TILES, INT4_TILES };

// The weights and the bias of a linear layer, cut into tiles of 64 outputs.
struct Packed {
    int64_t inputs, outputs;
    int32_t packing;
    const void* weights;
    const float *scales, *bias;  // of each output, padded to whole tiles; may be null
    const int32_t* sums;         // INT8_TILES: sums of the weights of each output
};

// What an instruction computes; `decode_tokens.h` and `decode_sequences.h` say how.
enum Operation : int32_t {
    EMBED,
    ADD_POSITIONS,
    ADD_SINUSOIDS,
    ANGLES,
    NORMALIZE,
    LINEAR_LAYER,
    LINEAR_BY_HEAD,
    APPLY,
    ADD,
    SCALE_HEADS,
    ROTATE,
    FEATURES,
    MIXTURE,
    CONVOLVE,
    AVERAGE,
    SCAN,
    RECUR,
    ATTEND
};

// The kinds of APPLY.
enum Function : int32_t {
    IDENTITY,
    GELU,
    GELU_TANH,
    RELU,
    SQUARED_RELU,
    ELU_PLUS_ONE,
    TANH,
    SILU,
    SIGMOID,
    LOG_SIGMOID,
    SOFTPLUS,
    EXPONENTIAL
};

// The kinds of FEATURES.
enum Features : int32_t {
    EXP_OF_QUERIES,
    EXP_OF_KEYS,
    PROBABILITIES,
    WITH_NEGATIVES,
    WAVES,
    NEIGHBOURS,
    PAIRS,
    BY_POSITION
};

// The kinds of RECUR: what the state is multiplied by before each token.
enum Gates : int32_t { NO_GATES, CONSTANT_GATES, GATE_PER_HEAD, GATE_PER_FEATURE, GATE_OF_AVERAGE };

// A step of a program. `to`, `first` and the like are places in the scratch memory of a token, in floats; -1
// for none. Fields that the description of an operation does not mention are 0.
struct Instruction {
    int32_t operation, kind;
    int64_t to, first, second, third, gates, rates, reader, writer, divisor_q, divisor_k;
    int64_t n, heads, groups, queries, keys, features, values, window;
    int64_t state;  // place in the state of a sequence, or in its cache
    float epsilon, scale;
    const float *weights, *bias;
    const double* frequencies;
    Packed layer;
};

// The state of a sequence, which is updated.
struct SequenceState {
    int64_t* position;  // tokens read so far
    float* state;       // what has a constant size
    float* cache;       // floats of all tokens, with room for `capacity` tokens
    int64_t capacity;
};

// A program that computes the logits of the next token, and the sequences that it reads.
struct Program {
    int64_t instructions;  // the last `head` of them run only for tokens whose logits are wanted
    int64_t head;
    int64_t width;                 // floats of scratch memory per token
    int64_t hidden, hidden_width;  // what the head reads
    int64_t logits, vocabulary;    // where the head writes
    int64_t widest;                // most inputs of a linear layer
    int32_t threads;
    int32_t steady;     // whether the same bits come out however many tokens are read at once
    int64_t positions;  // how many tokens a sequence may have; -1 for any number
    const Instruction* instruction;
    const SequenceState* sequence;
};

// Tokens to read. Those of one sequence are in order.
struct Tokens {
    int64_t n;
    const int64_t *token, *sequence;
    const int64_t* place;  // the row of `logits` that predicts what follows; -1 for none
    float* logits;         // [rows, vocabulary]
};

// How a token is drawn from logits: see the module `sampling` in Python.
struct Sampling {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;  // the size of the vocabulary for all
};

enum RowStatus : int32_t { ENDED, ACTIVE, NO_DISTRIBUTION, NO_POSITION };

// A sequence that is continued.
struct Row {
    Sampling sampling;
    int64_t key;                     // the key of its random stream
    int64_t limit;                   // the most new tokens
    int64_t stops;                   // how many token sequences end it
    const int64_t *stop, *stop_end;  // these sequences, one after the other, and where each ends
    int64_t* tokens;                 // the new tokens, with space for those of the next call
    uint8_t* seen;                   // [vocabulary]: whether a token has occurred; null without a penalty
    float* told;  // [most, vocabulary]: the logits of each token drawn in a call; null if nobody asks
};

// Sequences that are continued side by side.
struct Continuation {
    int64_t rows, most;  // rows, and how many tokens to draw for each in this call
    const Row* row;
    float* logits;    // [rows, vocabulary] of the next token
    int64_t* length;  // [rows]: new tokens so far
    uint8_t* status;  // [rows]: a `RowStatus`
};
