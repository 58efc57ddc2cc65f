// The rule of a diagonal plus low rank, a few tokens of one head at a time: shared by the forward and the
// backward pass. Every token has two keys. At k it writes its value, and at b what a read from the state
// before the token. With the gates and the letters of `gla_chunk.h`, B for the keys b as K for the keys k,
// and F_0 = 1:
//
//     u_i = (F_(i-1) * a_i)^T S + sum_(j < i) (a_i . K_(i-1)j) v_j + (a_i . B_(i-1)j) u_j
//     O   = (F * Q) S + W V + (q_i . B_ij) U          S' = F_C S + K_C^T V + B_C^T U
//
// So a reads the state and the earlier writes like a query, but one token behind. The products a . B and the
// reads u of a chunk, which depend on each other, are computed in double precision, since rounding adds up.
// That is little work for so few tokens.
#pragma once

#include "gla_chunk.h"

namespace UNROLLED_ISA {

// The same tokens as linear attention with these keys and values.
inline Gla without_reads(const Dplr& x) {
    return {x.sequences, x.tokens,  x.tokens, x.heads, x.heads, x.features,  x.values, x.type,
            x.threads,   x.offsets, x.q,      x.k,     x.v,     x.log_decay, nullptr,  x.state};
}

// Both keys of the tokens of a chunk.
class KeyPairs {
  public:
    KeyPairs(const Dplr& x, const Gla& gla, Workspace& memory)
        : k(gla, memory), b(gla, memory), x_(x), reads_(memory.rows(GLA_CHUNK, round_up(x.values))) {}

    void read(const Sequence& s, Int first, Int count, Int head) {
        k.read(s, first, count, head);
        b.read_beside(k, x_.b, s, first, head);
        b.values = reads_;
    }

    void prefetch(Prefetcher& next, const Sequence& s, Int first, Int count, Int head) const {
        k.prefetch(next, s, first, count, head);
        prefetch_rows(next, x_.b, x_.type, s.batch, first, head, count, x_.features);
    }

    // S' = F_C S + K_C^T V + B_C^T U, for the columns m to m + TILE_VECS * WIDTH.
    void update(Rows state, Int m, Prefetcher& prefetcher) const {
        const Rows keys = k.last(), writes = b.last();
        for (Int r = 0; r < x_.features; r += TILE_ROWS) {
            prefetcher.issue();
            with_tile(
                min(TILE_ROWS, x_.features - r), x_.values - m,
                [&](auto tile) __attribute__((always_inline)) {
                    float* at = row(state, r) + m;
                    tile.add_product({keys.data + r, 1, keys.row}, k.values.data + m, k.values.row, k.n);
                    tile.add_product({writes.data + r, 1, writes.row}, reads_.data + m, reads_.row, k.n);
                    tile.add_scaled_rows(at, state.row, k.decay() + r);
                    tile.write(at, state.row);
                });
        }
    }

    DecayedKeys k, b;  // with the values V and U

  private:
    const Dplr& x_;
    Rows reads_;
};

// Rows that read the state and the writes of a chunk: the queries, each after its own token, or the vectors
// a, each `behind` = 1 token earlier.
class Readers {
  public:
    Readers(const Dplr& x, const Tensor& from, Int behind, Workspace& memory)
        : rows(memory.rows(GLA_CHUNK, round_up(x.features))),
          decayed(memory.rows(GLA_CHUNK, round_up(x.features))),
          of_values{memory.zeros(GLA_CHUNK * GLA_CHUNK), GLA_CHUNK},
          of_reads{memory.zeros(GLA_CHUNK * GLA_CHUNK), GLA_CHUNK},
          behind(behind),
          x_(x),
          from_(from) {}

    void read(const Sequence& s, Int first, Int head, const KeyPairs& keys) {
        read_rows(from_, x_.type, s.batch, first, head, keys.k.n, x_.features, rows);
        for (Int i = 0; i < keys.k.n; ++i) {
            const float* x = row(rows, i);
            float* to = row(decayed, i);
            if (i < behind) {
                std::memcpy(to, x, (size_t)rows.row * 4);
                continue;
            }
            const float* factors = row(keys.k.from_start, i - behind);
            for (Int r = 0, R = x_.features; r < R; r += WIDTH)
                store(to + r, load(x + r) * load(factors + r));
            dots(x, {keys.k.at(i - behind, 0), rows.row}, count(i), x_.features, row(of_values, i));
            if (!behind)  // `Reads` computes those of a
                dots(x, {keys.b.at(i, 0), rows.row}, count(i), x_.features, row(of_reads, i));
        }
    }

    void prefetch(Prefetcher& next, const Sequence& s, Int first, Int count, Int head) const {
        prefetch_rows(next, from_, x_.type, s.batch, first, head, count, x_.features);
    }

    // Adds what the rows i, i + 1, ... read from the state and the values to a tile, for the columns from m.
    template <typename TileOf>
    __attribute__((always_inline)) void add_read(TileOf& tile, Int i, Int rows, Rows state,
                                                 const KeyPairs& keys, Int m) const {
        tile.add_product({row(decayed, i), decayed.row, 1}, state.data + m, state.row, x_.features);
        tile.add_product({row(of_values, i), GLA_CHUNK, 1}, keys.k.values.data + m, keys.k.values.row,
                         i + rows);
    }

    // The number of tokens that row i reads.
    Int count(Int i) const { return i + 1 - behind; }

    // The rows x, F * x, and the weights x . K and x . B with zeros above the diagonal.
    Rows rows, decayed, of_values, of_reads;
    const Int behind;

  private:
    const Dplr& x_;
    const Tensor& from_;
};

// What the vectors a of a chunk read.
class Reads {
  public:
    Reads(const Dplr& x, Workspace& memory)
        : a(x, x.a, 1, memory), x_(x), system_((double*)memory.zeros(2 * GLA_CHUNK * GLA_CHUNK)) {}

    void read(const Sequence& s, Int first, Int head, const KeyPairs& keys) {
        a.read(s, first, head, keys);
        for (Int i = 1; i < keys.k.n; ++i)
            for (Int j = 0; j < i; ++j)
                row(a.of_reads, i)[j] = (float)(system_[i * GLA_CHUNK + j] = exact_dot(
                                                    row(a.rows, i), keys.b.at(i - 1, j), x_.features));
    }

    // Computes the columns m to m + TILE_VECS * WIDTH of U.
    void solve(const KeyPairs& keys, Rows state, Int m) const {
        const Rows reads = keys.b.values;
        for (Int i = 0; i < keys.k.n; i += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, keys.k.n - i);
            with_tile(rows, x_.values - m, [&](auto tile) __attribute__((always_inline)) {
                a.add_read(tile, i, rows, state, keys, m);
                tile.write(row(reads, i) + m, reads.row);
            });
        }
        for (Int c = m; c < min(m + TILE_VECS * WIDTH, reads.row); c += DOUBLES)
            solve_columns(reads, keys.k.n, c);
    }

    // The transposed system: turns the gradients of U as they come from the outputs and the next chunk into
    // the whole gradients.
    void solve_back(Rows gradients, Int n) const {
        for (Int i = n - 2; i >= 0; --i)
            for (Int m = 0; m < x_.values; m += WIDTH) {
                Vec total = load(row(gradients, i) + m);
                for (Int j = i + 1; j < n; ++j)
                    total += broadcast(row(a.of_reads, j)[i]) * load(row(gradients, j) + m);
                store(row(gradients, i) + m, total);
            }
    }

    Readers a;

  private:
    // From what the rows read from the state and the values to U, for a vector of columns.
    void solve_columns(Rows reads, Int n, Int c) const {
        DoubleVec u[GLA_CHUNK];
#pragma GCC unroll 8
        for (Int i = 0; i < GLA_CHUNK; ++i) {
            if (i >= n) return;
            float* at = row(reads, i) + c;
            u[i] = load_widened(at);
#pragma GCC unroll 8
            for (Int j = 0; j < i; ++j) u[i] += broadcast_double(system_[i * GLA_CHUNK + j]) * u[j];
            store_narrowed(at, u[i]);
        }
    }

    const Dplr& x_;
    double* system_;  // a . B
};

}  // namespace UNROLLED_ISA
