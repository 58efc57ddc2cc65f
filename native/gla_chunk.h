// Linear attention with a decay for every feature, a few tokens of one head at a time: shared by the forward
// and the backward pass. For a key head with the gates a and the state S before the chunk, elementwise over
// the features:
//
//     F_i = a_1 ... a_i          K_ij = a_(j+1) ... a_i k_j for j <= i, key j as query i finds it
//     W_ij = q_i . K_ij          O = W V + (F * Q) S          S' = F_C S + K_C^T V
//
// No factor exceeds 1 and nothing is divided, so nothing overflows, and a gate of 0 is exact. K is computed
// row by row, K_ij = a_i K_(i-1)j, as the recurrence would.
#pragma once

#include "rows.h"

namespace UNROLLED_ISA {

// Tokens of a chunk. A token costs 2 + 1 / C multiply-adds per number of the state, and C / 2 products of
// whole keys.
constexpr Int GLA_CHUNK = 8;

// How the key heads of a sequence are divided into blocks of neighbouring heads. A head has `states` states;
// a block has as many heads as have all their states in the second-level cache, 2^17 floats or 512 KiB.
// Blocks are smaller if there would be fewer blocks than threads.
struct GlaPlan {
    Int heads, blocks, threads;

    GlaPlan(const Gla& x, Int states) {
        const Int state = max(1, x.features * x.values);
        threads = threads_for((double)x.sequences * (double)x.keys * (double)(x.heads * state), x.threads);
        heads = min(max(1, x.groups), max(1, (1 << 17) / state / states));
        const Int whole = whole_sequences(x);
        while (heads > 1 && whole * ceil_div(x.groups, heads) < threads) heads = ceil_div(heads, 2);
        blocks = ceil_div(x.groups, heads);
    }
};

// out_j = a . b_j for the first rows of B.
inline void dots(const float* a, Rows b, Int count, Int n, float* out) {
    Int j = 0;
    for (; j + 4 <= count; j += 4) {
        const float* at = row(b, j);
        Vec sums[4]{};
        for (Int i = 0; i < n; i += WIDTH)
            for (int c = 0; c < 4; ++c) sums[c] += load(a + i) * load(at + c * b.row + i);
        for (int c = 0; c < 4; ++c) out[j + c] = sum(sums[c]);
    }
    for (; j < count; ++j) out[j] = dot(a, row(b, j), n);
}

class DecayedKeys {
  public:
    DecayedKeys(const Gla& x, Workspace& memory)
        : gates(memory.rows(GLA_CHUNK, round_up(x.features))),
          from_start(memory.rows(GLA_CHUNK, round_up(x.features))),
          x_(x),
          value_rows_(x.type, x.values, GLA_CHUNK, memory, x.rates),
          keys_(memory.rows(GLA_CHUNK * (GLA_CHUNK + 1) / 2, round_up(x.features))) {}

    void read(const Sequence& s, Int first, Int count, Int group) {
        n = count;
        values = value_rows_.read(x_.v, s.batch, first, group, n);
        for (Int i = 0; i < n; ++i)
            read_row(FLOAT32, address(x_.log_decay, FLOAT32, s.batch, first + i, group), x_.features,
                     row(gates, i));
        for (Int i = n; i < GLA_CHUNK; ++i)  // gates of 1
            std::memset(row(gates, i), 0, (size_t)gates.row * 4);
        read_keys(x_.k, s, first, group);
        const Rows gate = gates, product = from_start,
                   keys = keys_;  // copies: members would be read again after every store
        for (Int r = 0; r < gate.row; r += WIDTH) {
            Vec decay = broadcast(1), key[GLA_CHUNK];
#pragma GCC unroll 8
            for (Int i = 0; i < GLA_CHUNK; ++i) {
                const Vec a = exp(load(row(gate, i) + r));
                store(row(gate, i) + r, a);
                store(row(product, i) + r, decay *= a);
#pragma GCC unroll 8
                for (Int j = 0; j < i; ++j) store(row(keys, place(i, j)) + r, key[j] *= a);
                key[i] = load(row(keys, place(i, i)) + r);
            }
        }
    }

    // Reads other keys `k` of the tokens that `first_keys` has read, under the same gates. Their values are
    // the caller's.
    void read_beside(const DecayedKeys& first_keys, const Tensor& k, const Sequence& s, Int first,
                     Int group) {
        n = first_keys.n;
        read_keys(k, s, first, group);
        const Rows gate = first_keys.gates, keys = keys_;
        for (Int r = 0; r < gate.row; r += WIDTH) {
            Vec key[GLA_CHUNK];
#pragma GCC unroll 8
            for (Int i = 0; i < GLA_CHUNK; ++i) {
                const Vec a = load(row(gate, i) + r);
#pragma GCC unroll 8
                for (Int j = 0; j < i; ++j) store(row(keys, place(i, j)) + r, key[j] *= a);
                key[i] = load(row(keys, place(i, i)) + r);
            }
        }
    }

    // S' = F_C S + K_C^T V, for the columns m to m + TILE_VECS * WIDTH.
    void update(Rows state, Int m, Prefetcher& prefetcher) const {
        const Rows keys = last();
        for (Int r = 0; r < x_.features; r += TILE_ROWS) {
            prefetcher.issue();
            with_tile(min(TILE_ROWS, x_.features - r), x_.values - m,
                      [&](auto tile) __attribute__((always_inline)) {
                          float* at = row(state, r) + m;
                          tile.add_product({keys.data + r, 1, keys.row}, values.data + m, values.row, n);
                          tile.add_scaled_rows(at, state.row, decay() + r);
                          tile.write(at, state.row);
                      });
        }
    }

    // Adds the keys, values and gates of a chunk to what a prefetcher requests.
    void prefetch(Prefetcher& next, const Sequence& s, Int first, Int count, Int group) const {
        prefetch_rows(next, x_.v, x_.type, s.batch, first, group, count, x_.values);
        prefetch_rows(next, x_.k, x_.type, s.batch, first, group, count, x_.features);
        prefetch_rows(next, x_.log_decay, FLOAT32, s.batch, first, group, count, x_.features);
    }

    // K_ij
    float* at(Int i, Int j) const { return row(keys_, place(i, j)); }

    // K_C, the keys as the next chunk finds them.
    Rows last() const { return {at(GLA_CHUNK - 1, 0), keys_.row}; }
    // F_C
    const float* decay() const { return row(from_start, GLA_CHUNK - 1); }

    Int n = 0;
    Rows gates, from_start, values{};  // a, F, V

  private:
    static Int place(Int i, Int j) { return i * (i + 1) / 2 + j; }

    void read_keys(const Tensor& k, const Sequence& s, Int first, Int group) const {
        for (Int i = 0; i < n; ++i)
            read_row(x_.type, address(k, x_.type, s.batch, first + i, group), x_.features, at(i, i));
        for (Int i = n; i < GLA_CHUNK; ++i)  // keys of 0
            std::memset(at(i, i), 0, (size_t)keys_.row * 4);
    }

    const Gla& x_;
    HeadRows value_rows_;
    Rows keys_;
};

// The queries of all heads that read a key head; the rows of query head p begin at p * GLA_CHUNK. With rates
// there is one more head, the last, for `DecayedCorrections`.
class DecayedQueries {
  public:
    DecayedQueries(const Gla& x, Workspace& memory)
        : heads(x.heads / x.groups),
          readers(heads + (x.rates ? 1 : 0)),
          rows(memory.rows(readers * GLA_CHUNK, round_up(x.features))),
          decayed(memory.rows(readers * GLA_CHUNK, round_up(x.features))),
          weights{memory.zeros(readers * GLA_CHUNK * GLA_CHUNK), GLA_CHUNK},
          x_(x) {}

    void read(const Sequence& s, Int first, Int group, const DecayedKeys& keys) {
        for (Int p = 0; p < heads; ++p)
            for (Int i = 0; i < keys.n; ++i) {
                float* q = of(rows, p, i);
                read_row(x_.type, address(x_.q, x_.type, s.batch, first + i, group * heads + p), x_.features,
                         q);
                decay(p, i, keys);
                dots(q, {keys.at(i, 0), rows.row}, i + 1, x_.features, of(weights, p, i));
            }
    }

    // F * Q for one query.
    void decay(Int head, Int i, const DecayedKeys& keys) const {
        const float *q = of(rows, head, i), *factors = row(keys.from_start, i);
        float* to = of(decayed, head, i);
        for (Int r = 0, R = x_.features; r < R; r += WIDTH) store(to + r, load(q + r) * load(factors + r));
    }

    void prefetch(Prefetcher& next, const Sequence& s, Int first, Int count, Int group) const {
        for (Int p = 0; p < heads; ++p)
            prefetch_rows(next, x_.q, x_.type, s.batch, first, group * heads + p, count, x_.features);
    }

    float* of(Rows x, Int head, Int i) const { return row(x, head * GLA_CHUNK + i); }

    const Int heads, readers;
    Rows rows, decayed, weights;  // Q, F * Q, and W with zeros above its diagonal

  private:
    const Gla& x_;
};

}  // namespace UNROLLED_ISA
