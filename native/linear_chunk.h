// Linear attention, one chunk of one head at a time: shared by the forward and the backward pass. Formulas
// and letters are those of the chunked form in Python. For a key head with state S, z before the chunk:
//
//     b = cumsum(log a), over the chunk
//     D_ij = exp(b_i - b_j) for i >= j, else 0
//     P = (Q K^T) * D
//     den = P 1 + exp(b) Q z
//     O = (P V + exp(b) Q S) / den
//     S' = exp(b_C) S + K^T (exp(b_C - b) V)
//     z' = exp(b_C) z + K^T exp(b_C - b)
#pragma once

#include "feature_rows.h"

namespace UNROLLED_ISA {

// Tokens of a chunk, a multiple of every WIDTH. The state is read and written once per chunk, so a long chunk
// saves time. In causal attention, the scores inside a chunk cost more the longer the chunk is: 13% of the
// multiply-adds of the recurrence at 16 tokens and widths of 64. So a causal chunk is short, unless the state
// exceeds the 16 KiB of 64 x 64 floats and no longer fits into the first-level cache beside the rest.
inline Int chunk_length(const Linear& x) {
    if (!x.causal) return 64;
    return x.features * x.values <= 64 * 64 ? 16 : 32;
}

// S [features, values], or its transpose [values, features], and z [features], padded to whole vectors. The
// number of rows is rounded up to four, for `transpose`.
struct State {
    Rows kv;
    float* k_sum;
};

enum class Layout { PLAIN, TRANSPOSED };

inline Int kv_floats(const Linear& x, Layout layout) {
    const bool plain = layout == Layout::PLAIN;
    const Int rows = plain ? x.features : x.values, cols = plain ? x.values : x.features;
    return ceil_div(rows, 4) * 4 * round_up(cols);
}

inline Int state_floats(const Linear& x, Layout layout) {
    return kv_floats(x, layout) + round_up(x.features);
}

inline State state_at(const Linear& x, Layout layout, float* at) {
    return {{at, round_up(layout == Layout::PLAIN ? x.values : x.features)}, at + kv_floats(x, layout)};
}

inline void read_state(const Linear& x, Layout layout, const float* kv, const float* k_sum, Int head,
                       State to) {
    const Int R = x.features, M = x.values;
    std::memset(to.kv.data, 0, (size_t)state_floats(x, layout) * 4);
    if (kv)
        for (Int r = 0; r < R; ++r) {
            const float* from = kv + (head * R + r) * M;
            if (layout == Layout::PLAIN) read_row(FLOAT32, from, M, to.kv.data + r * to.kv.row);
            else
                for (Int m = 0; m < M; ++m) to.kv.data[m * to.kv.row + r] = from[m];
        }
    if (k_sum) read_row(FLOAT32, k_sum + head * R, R, to.k_sum);
}

// Writes a state of the plain layout, z only where there is an array for it.
inline void write_state(const Linear& x, State from, Int head, float* kv, float* k_sum) {
    const Int R = x.features, M = x.values;
    for (Int r = 0; r < R; ++r)
        write_row(FLOAT32, from.kv.data + r * from.kv.row, M, kv + (head * R + r) * M);
    if (k_sum) write_row(FLOAT32, from.k_sum, R, k_sum + head * R);
}

constexpr double LOWEST_GATE = -1e4;  // exp of it is 0, and unlike -infinity it may be subtracted from itself

inline double log_gate(const Linear& x, Int batch, Int token, Int group) {
    const double gate = x.log_decay[(batch * x.keys + token) * x.groups + group];
    return gate < LOWEST_GATE ? LOWEST_GATE : gate;
}

// out_j = exp(sign (b_j - base)) for j < n. The difference is taken in double precision and kept as the sum
// of two floats, so that the result is exact to single precision however large b is.
inline void exp_of_differences(double sign, const double* b, double base, Int n, float* out) {
    for (Int j = 0; j < n; j += WIDTH) {
        float high[WIDTH], low[WIDTH];
        for (Int i = 0; i < WIDTH; ++i) {
            const double difference = sign * (b[j + i] - base);
            high[i] = (float)difference;
            low[i] = (float)(difference - (double)high[i]);
        }
        const Vec y = exp(load(high));
        store(out + j, y + y * load(low));
    }
}

// Keeps the elements [first, end) of a vector that begins at element `at`, and sets the others to 0.
inline Vec keep(Int first, Int end, Int at, Vec x) {
    IntVec lane;
    for (int i = 0; i < WIDTH; ++i) lane[i] = i;
    lane += (int32_t)at;
    return select((lane >= (int32_t)first) & (lane < (int32_t)end), x, Vec{});
}

// The decays of one chunk, from the gates a. Its arrays are null without gates.
class Gates {
  public:
    Gates(const Linear& x, Int longest, Workspace& memory) : x_(x) {
        if (!x.log_decay) return;
        b_ = (double*)memory.zeros(2 * longest);
        logs_ = (double*)memory.zeros(2 * longest);
        gate = memory.floats(longest);
        decay_ = memory.floats(longest);
        from_start = memory.floats(longest);
        to_end = memory.floats(longest);
    }

    void read(Int batch, Int token, Int n, Int group) {
        if (!x_.log_decay) return;
        double total = 0;
        for (Int i = 0; i < n; ++i) {
            logs_[i] = log_gate(x_, batch, token + i, group);
            b_[i] = total += logs_[i];
        }
        exp_of_differences(1, logs_, 0, n, gate);
        exp_of_differences(1, b_, 0, n, from_start);
        exp_of_differences(-1, b_, total, n, to_end);
        chunk_decay = (float)__builtin_exp(total);
    }

    // Column j of D: exp(b_i - b_j) for all i < n, of which only i >= j is meaningful.
    void column(Int j, Int n, float* out) const { exp_of_differences(1, b_, b_[j], n, out); }

    // Multiplies the scores of key j and the queries i >= `from` by D_ij, which is 0 for i < j.
    void apply_decay(float* scores, Int j, Int from, Int queries) const {
        if (from_start) column(j, queries, decay_);
        for (Int i = from; i < queries; i += WIDTH) {
            Vec x = load(scores + i);
            if (from_start) x *= load(decay_ + i);
            store(scores + i, keep(j, queries, i, x));
        }
    }

    float* gate = nullptr;        // a
    float* from_start = nullptr;  // exp(b)
    float* to_end = nullptr;      // exp(b_C - b)
    float chunk_decay = 1;        // exp(b_C)

  private:
    const Linear& x_;
    double *logs_ = nullptr, *b_ = nullptr;
    float* decay_ = nullptr;
};

// Divides rows by their lengths, as `unit_epsilon` says, and multiplies them by `scale`.
inline void make_unit_rows(const Linear& x, Rows rows, Int n, float scale) {
    for (Int i = 0; i < n; ++i) {
        float* at = rows.data + i * rows.row;
        scale_row(at, x.features, scale / __builtin_sqrtf(dot(at, at, x.features) + x.unit_epsilon));
    }
}

// The keys and values of one chunk of one head.
struct KeyChunk {
    // What is read often is copied: rows a whole token apart compete for few sets of the first-level cache.
    KeyChunk(const Linear& x, bool copy_keys, bool copy_values, Workspace& memory)
        : longest(chunk_length(x)),
          gates(x, longest, memory),
          x_(x),
          key_rows_(x, Side::KEYS, longest, memory, copy_keys || x.unit_epsilon > 0),
          value_rows_(x.type, x.values, longest, memory, copy_values) {}

    void read(const Sequence& s, Int first, Int count, Int group) {
        token = first;
        n = count;
        keys = key_rows_.read(s.batch, token, group, n);
        if (x_.unit_epsilon > 0) make_unit_rows(x_, keys, n, 1);
        values = value_rows_.read(x_.v, s.batch, token, group, n);
        gates.read(s.batch, token, n, group);
    }

    // S' = chunk_decay S + K^T (to_end V) and z' = chunk_decay z + K^T to_end; `after` may be `before`. With
    // gates, the values are scaled in place, so they must be copies.
    void update(State before, State after, Prefetcher& prefetcher) const {
        for (Int j = 0; gates.to_end && j < n; ++j) scale_row(row(values, j), x_.values, gates.to_end[j]);
        multiply_onto(gates.chunk_decay, before.kv, x_.features, x_.values, n, {keys.data, 1, keys.row},
                      values, after.kv, prefetcher);
        update_key_sum(before.k_sum, after.k_sum, gates.to_end);
    }

    // The same for the transposed state. With gates, the keys are scaled in place, so they must be copies.
    void update_transposed(State state, Prefetcher& prefetcher) const {
        for (Int j = 0; gates.to_end && j < n; ++j) scale_row(row(keys, j), x_.features, gates.to_end[j]);
        multiply_onto(gates.chunk_decay, state.kv, x_.values, x_.features, n, {values.data, 1, values.row},
                      keys, state.kv, prefetcher);
        update_key_sum(state.k_sum, state.k_sum, nullptr);
    }

    // Turns the gradients of the features into those of the keys, and writes row i to `at(i)`.
    template <typename F>
    void write_key_gradients(Rows gradient, F&& at) const {
        key_rows_.write_gradients(n, gradient, at);
    }

    Int longest, token = 0, n = 0;
    Rows keys{}, values{};
    Gates gates;

  private:
    void update_key_sum(const float* before, float* after, const float* factors) const {
        for (Int r = 0; r < x_.features; r += WIDTH) {
            Vec total{};
            for (Int j = 0; j < n; ++j) {
                const Vec key = load(keys.data + j * keys.row + r);
                total += factors ? key * broadcast(factors[j]) : key;
            }
            store(after + r, broadcast(gates.chunk_decay) * load(before + r) + total);
        }
    }

    const Linear& x_;
    FeatureRows key_rows_;
    HeadRows value_rows_;
};

// P^T = D^T * (K Q^T), from rows of keys and transposed queries. Queries before all keys of a tile are left
// out.
inline void score(const Gates& gates, Int n, Int width, Rows keys, Rows queries_T, Rows scores_T,
                  Prefetcher& prefetcher) {
    for (Int j = 0; j < n; j += TILE_ROWS) {
        const Int rows = min(TILE_ROWS, n - j), from = j / WIDTH * WIDTH;
        const Rows to = {scores_T.data + j * scores_T.row, scores_T.row};
        prefetcher.issue();
        multiply_few_rows(rows, n - from, width, {keys.data + j * keys.row, keys.row, 1},
                          {queries_T.data + from, queries_T.row}, {to.data + from, to.row}, false);
        for (Int a = 0; a < rows; ++a) gates.apply_decay(to.data + a * to.row, j + a, from, n);
    }
}

}  // namespace UNROLLED_ISA
