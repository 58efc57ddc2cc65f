// The delta rule with a decay for every feature, a few tokens of one head at a time. As in `delta_chunk.h`, a
// token writes what its key does not yet retrieve, and these corrections n take the place of the values. For
// the rates r and the letters of `gla_chunk.h`:
//
//     u_i = v_i - (F_i * k_i)^T S - sum_(j < i) A_ij n_j        A_ij = k_i . K_ij        n_i = r_i u_i
//
// So the keys read the state and the earlier corrections as queries do. They are kept as one more head of
// queries, with weights A, except that a key does not read its own correction. With similar keys and rates
// near 2, the corrections alternate in sign and rounding adds up. So A and the corrections of a chunk are
// computed in double precision, which is little work for so few tokens.
#pragma once

#include "gla_chunk.h"

namespace UNROLLED_ISA {

class DecayedCorrections {
  public:
    DecayedCorrections(const Gla& x, Workspace& memory) : x_(x) {
        if (!x.rates) return;
        residuals = memory.rows(GLA_CHUNK, round_up(x.values));
        rates_ = memory.floats(GLA_CHUNK);
        system_ = (double*)memory.zeros(2 * GLA_CHUNK * GLA_CHUNK);
    }

    // Reads the rates of a chunk, makes its keys a head of queries, and computes A.
    void read(const Sequence& s, Int first, Int group, const DecayedKeys& keys, DecayedQueries& queries) {
        const Int R = x_.features;
        for (Int i = 0; i < keys.n; ++i) {
            rates_[i] = x_.rates[(s.batch * x_.keys + first + i) * x_.groups + group];
            const float* key = keys.at(i, i);
            std::memcpy(queries.of(queries.rows, queries.heads, i), key, (size_t)queries.rows.row * 4);
            queries.decay(queries.heads, i, keys);
            float* weights = queries.of(queries.weights, queries.heads, i);
            for (Int j = 0; j < i; ++j)
                weights[j] = (float)(system_[i * GLA_CHUNK + j] = exact_dot(key, keys.at(i, j), R));
        }
    }

    // Replaces the columns m to m + TILE_VECS * WIDTH of the values, which must be copies, by the
    // corrections.
    void solve(const DecayedKeys& keys, const DecayedQueries& queries, Rows state, Int m) {
        for (Int i = 0; i < keys.n; i += TILE_ROWS)
            with_tile(
                min(TILE_ROWS, keys.n - i), x_.values - m, [&](auto tile) __attribute__((always_inline)) {
                    tile.add_product({queries.of(queries.decayed, queries.heads, i), queries.decayed.row, 1},
                                     state.data + m, state.row, x_.features);
                    tile.write(row(residuals, i) + m, residuals.row);
                });
        for (Int c = m; c < min(m + TILE_VECS * WIDTH, residuals.row); c += DOUBLES) solve_columns(keys, c);
    }

    // Replaces the values of a chunk whose residuals are known by the corrections.
    void restore(const DecayedKeys& keys) const {
        for (Int i = 0; i < keys.n; ++i)
            for (Int m = 0; m < x_.values; m += WIDTH)
                store(row(keys.values, i) + m, load(row(residuals, i) + m) * broadcast(rates_[i]));
    }

    // From the gradients of the corrections to those of the values, and of the rates.
    void solve_back(const DecayedKeys& keys, const DecayedQueries& queries, Rows gradients,
                    float* d_rates) const {
        for (Int i = keys.n - 1; i >= 0; --i) {
            float* gradient = row(gradients, i);
            for (Int m = 0; m < x_.values; m += WIDTH) {
                Vec total = load(gradient + m);
                for (Int j = i + 1; j < keys.n; ++j)
                    total -= broadcast(queries.of(queries.weights, queries.heads, j)[i]) *
                             load(row(gradients, j) + m);
                store(gradient + m, total);
            }
            d_rates[i] = dot(gradient, row(residuals, i), x_.values);
            scale_row(gradient, x_.values, rates_[i]);
        }
    }

    Rows residuals{};  // u

  private:
    // From what the keys read from the state to u and n, for a vector of columns.
    void solve_columns(const DecayedKeys& keys, Int c) {
        DoubleVec corrections[GLA_CHUNK];
#pragma GCC unroll 8
        for (Int i = 0; i < GLA_CHUNK; ++i) {
            if (i >= keys.n) return;
            float *value = row(keys.values, i) + c, *residual = row(residuals, i) + c;
            DoubleVec u = load_widened(value) - load_widened(residual);
#pragma GCC unroll 8
            for (Int j = 0; j < i; ++j) u -= broadcast_double(system_[i * GLA_CHUNK + j]) * corrections[j];
            corrections[i] = broadcast_double(rates_[i]) * u;
            store_narrowed(residual, u);
            store_narrowed(value, corrections[i]);
        }
    }

    const Gla& x_;
    float* rates_ = nullptr;
    double* system_ = nullptr;  // A
};

}  // namespace UNROLLED_ISA
