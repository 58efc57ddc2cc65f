// The delta rule, one chunk of one head at a time. A token writes what its key does not yet retrieve: the
// value minus what the key reads, times a rate. These corrections n take the place of the values, and all
// else is linear attention without a divisor. For the rates r, the rows k_i, v_i of a chunk, the state S
// before the chunk, and b and D as in `linear_chunk.h`:
//
//     u_i = v_i - exp(b_i) S^T k_i - sum_{j < i} D_ij (k_i . k_j) n_j        n_i = r_i u_i
//
// The sum over j is a triangular system. It is solved a few rows at a time: first a product with the rows
// that are already solved, then these few rows one by one. With similar keys and rates near 2, the
// corrections alternate in sign, and the rounding of k_i . k_j, which is then the same for all pairs, adds
// up. So from the first rate above 1 on, a chunk is solved in double precision, which makes the forward pass
// slower by a quarter. The rows before it are not, since a later rate may not change them.
#pragma once

#include "linear_chunk.h"

namespace UNROLLED_ISA {

class Corrections {
  public:
    Corrections(const Linear& x, Workspace& memory) : x_(x), longest_(chunk_length(x)) {
        if (!x.rates) return;
        const Int C = longest_, R = round_up(x.features), M = round_up(x.values);
        residuals = {memory.zeros(C * M), M};
        scores_T = memory.rows(C, C);
        keys_T_ = {memory.zeros(R * C), C};
        read_T_ = {memory.zeros(M * C), C};
        rates_ = memory.floats(C);
        decay_ = memory.floats(C);
        keys_ = (double*)memory.zeros(2 * C * R);
        system_T_ = (double*)memory.zeros(2 * C * C);
        corrections_ = (double*)memory.zeros(2 * C * M);
    }

    // Replaces the values of the chunk, which must be copies, by their corrections.
    void solve(const Sequence& s, const KeyChunk& chunk, Int group, State state, Layout layout,
               Prefetcher& prefetcher) {
        read(s, chunk, group);
        const Int n = chunk.n, M = x_.values;
        // What the keys read from the state.
        if (layout == Layout::PLAIN)
            multiply(n, M, x_.features, {keys_T_.data, 1, keys_T_.row}, state.kv, residuals, prefetcher);
        else {
            multiply(M, n, x_.features, {state.kv.data, state.kv.row, 1}, keys_T_, read_T_, prefetcher);
            transpose(M, n, read_T_.data, read_T_.row, residuals);
        }
        Int first = 0;
        while (first < n && !(rates_[first] > 1)) ++first;
        if (first > 0) solve_in_tiles(chunk, first, prefetcher);
        if (first < n) solve_exactly(chunk, first);
    }

    // For a chunk whose residuals are known: replaces its values by the corrections, and computes the scores.
    void restore(const Sequence& s, const KeyChunk& chunk, Int group, Prefetcher& prefetcher) {
        read(s, chunk, group);
        for (Int i = 0; i < chunk.n; ++i) write_correction(chunk, i);
        score(chunk.gates, chunk.n, x_.features, chunk.keys, keys_T_, scores_T, prefetcher);
    }

    // Solves the transposed system for a chunk that is restored, a few rows at a time: replaces the gradients
    // of the corrections by those of the values, and computes those of the rates.
    void solve_back(const KeyChunk& chunk, Rows gradients, float* d_rates) const {
        const Int n = chunk.n, last = (n - 1) / TILE_ROWS * TILE_ROWS;
        for (Int i = last; i >= 0; i -= TILE_ROWS) {
            const Int end = min(i + TILE_ROWS, n);
            subtract_product(end - i, n - end, {row(scores_T, i) + end, scores_T.row, 1},
                             {row(gradients, end), gradients.row}, {row(gradients, i), gradients.row});
            for (Int a = end - 1; a >= i; --a) {
                float* gradient = row(gradients, a);
                for (Int j = a + 1; j < end; ++j)
                    subtract_row(gradient, row(scores_T, a)[j], row(gradients, j));
                d_rates[a] = dot(gradient, row(residuals, a), x_.values);
                scale_row(gradient, x_.values, rates_[a]);
            }
        }
    }

    Rows residuals{};  // u
    Rows scores_T{};   // row j: D_ij (k_i . k_j) for i >= j, else 0

  private:
    void read(const Sequence& s, const KeyChunk& chunk, Int group) {
        for (Int j = 0; j < chunk.n; ++j)
            rates_[j] = x_.rates[(s.batch * x_.keys + chunk.token + j) * x_.groups + group];
        transpose(chunk.n, x_.features, chunk.keys.data, chunk.keys.row, keys_T_);
    }

    void write_correction(const KeyChunk& chunk, Int i) const {
        for (Int m = 0; m < x_.values; m += WIDTH)
            store(row(chunk.values, i) + m, broadcast(rates_[i]) * load(row(residuals, i) + m));
    }

    // From what the keys read from the state to the residuals, and from the values to the corrections, for
    // the first n rows.
    void solve_in_tiles(const KeyChunk& chunk, Int n, Prefetcher& prefetcher) {
        score(chunk.gates, chunk.n, x_.features, chunk.keys, keys_T_, scores_T, prefetcher);
        for (Int i = 0; i < n; ++i) {
            const Vec decay = broadcast(chunk.gates.from_start ? chunk.gates.from_start[i] : 1);
            for (Int m = 0; m < x_.values; m += WIDTH) {
                float* residual = row(residuals, i) + m;
                store(residual, load(row(chunk.values, i) + m) - decay * load(residual));
            }
        }
        for (Int i = 0; i < n; i += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, n - i);
            subtract_product(rows, i, {scores_T.data + i, 1, scores_T.row}, chunk.values,
                             {row(residuals, i), residuals.row});
            for (Int a = i; a < i + rows; ++a) {
                for (Int j = i; j < a; ++j)
                    subtract_row(row(residuals, a), row(scores_T, j)[a], row(chunk.values, j));
                write_correction(chunk, a);
            }
        }
    }

    // The same in double precision, row by row, from row `first` on; the rows before it are solved.
    void solve_exactly(const KeyChunk& chunk, Int first) {
        compute_system(chunk);
        const Int M = x_.values;
        for (Int j = 0; j < first; ++j)
            for (Int m = 0; m < M; m += DOUBLES)
                store_doubles(corrections_ + j * residuals.row + m, load_widened(row(chunk.values, j) + m));
        for (Int i = first; i < chunk.n; ++i)
            for (Int m = 0; m < M;)
                if (M - m > 3 * WIDTH) solve_row<8>(chunk, i, m), m += 4 * WIDTH;
                else solve_row<2>(chunk, i, m), m += WIDTH;
    }

    // Row j of `system_T_`: D_ij (k_i . k_j) for i >= j.
    void compute_system(const KeyChunk& chunk) {
        const Int n = chunk.n, R = round_up(x_.features);
        for (Int j = 0; j < n; ++j)
            for (Int r = 0; r < R; r += DOUBLES)
                store_doubles(keys_ + j * R + r, load_widened(row(chunk.keys, j) + r));
        for (Int j = 0; j < n; j += 4)
            for (Int i = j / WIDTH * WIDTH; i < n; i += WIDTH) {
                DoubleVec sums[4][2]{};
                for (Int r = 0; r < x_.features; ++r) {
                    const float* keys = row(keys_T_, r);
                    const DoubleVec right[2] = {load_widened(keys + i), load_widened(keys + i + DOUBLES)};
                    for (Int a = 0; a < 4; ++a) {
                        const DoubleVec left = broadcast_double(keys_[(j + a) * R + r]);
                        for (Int b = 0; b < 2; ++b) sums[a][b] += left * right[b];
                    }
                }
                for (Int a = 0; a < 4; ++a)
                    for (Int b = 0; b < 2; ++b)
                        store_doubles(system_T_ + (j + a) * longest_ + i + b * DOUBLES, sums[a][b]);
            }
        for (Int j = 0; chunk.gates.from_start && j < n; ++j) {
            chunk.gates.column(j, n, decay_);
            for (Int i = j; i < n; ++i) system_T_[j * longest_ + i] *= decay_[i];
        }
    }

    // Columns m to m + VECS * DOUBLES of u_i and n_i, from what key i reads from the state.
    template <int VECS>
    void solve_row(const KeyChunk& chunk, Int i, Int m) {
        const Int M = residuals.row;
        const double from_start = chunk.gates.from_start ? chunk.gates.from_start[i] : 1;
        float *value = row(chunk.values, i) + m, *residual = row(residuals, i) + m;
        DoubleVec u[VECS];
        for (int a = 0; a < VECS; ++a)
            u[a] = load_widened(value + a * DOUBLES) -
                   broadcast_double(from_start) * load_widened(residual + a * DOUBLES);
        for (Int j = 0; j < i; ++j) {
            const DoubleVec factor = broadcast_double(system_T_[j * longest_ + i]);
            for (int a = 0; a < VECS; ++a)
                u[a] -= factor * load_doubles(corrections_ + j * M + m + a * DOUBLES);
        }
        for (int a = 0; a < VECS; ++a) {
            const DoubleVec correction = broadcast_double(rates_[i]) * u[a];
            store_doubles(corrections_ + i * M + m + a * DOUBLES, correction);
            store_narrowed(residual + a * DOUBLES, u[a]);
            store_narrowed(value + a * DOUBLES, correction);
        }
    }

    void subtract_row(float* from, float factor, const float* x) const {
        for (Int m = 0; m < x_.values; m += WIDTH)
            store(from + m, load(from + m) - broadcast(factor) * load(x + m));
    }

    // C -= A B for A [rows, depth] of at most TILE_ROWS rows and B [depth, values].
    void subtract_product(Int rows, Int depth, Strided a, Rows b, Rows c) const {
        for (Int m = 0; depth && m < x_.values; m += TILE_VECS * WIDTH)
            with_tile(rows, x_.values - m, [&](auto tile) __attribute__((always_inline)) {
                tile.add_product(a, b.data + m, b.row, depth);
                tile.subtract_from(c.data + m, c.row);
            });
    }

    const Linear& x_;
    const Int longest_;
    Rows keys_T_{}, read_T_{};
    float *rates_ = nullptr, *decay_ = nullptr;
    double *keys_ = nullptr, *system_T_ = nullptr, *corrections_ = nullptr;
};

}  // namespace UNROLLED_ISA
