// Linear attention with a decay for every feature, backward. The letters are those of `gla_chunk.h`; dX is
// the gradient of X. The states of a whole sequence would take more memory than its inputs, so only a few are
// kept, and the states between them are computed again.
//
// For each sequence and key head:
// 1. Compute the states and keep the one before each span, transposed: S^T [values, features]. With rates,
//    solve for the corrections of the delta rule and keep their residuals u; from here on, V are the
//    corrections.
// For each span, from the last to the first:
// 2. Compute the states before its chunks again.
// For each of its chunks, from the last to the first, with dS after it:
// 3. Read the inputs and dO, and compute K, W and dW = dO V^T below and on its diagonal.
// 4. dV = W^T dO + K_C dS. With rates, solve for the gradients dv of the values and of the rates. In all
//    steps that follow, the keys are then one more head of queries, with dO = -dv.
// 5. dQ_i = F_i * (dO_i S^T) + sum_j dW_ij K_ij, and dF_i = Q_i * (dO_i S^T); dF_C also has the sums of the
//    rows of S * dS.
// 6. dK_C = V dS^T, and dK_ij += dW_ij Q_i. From the last token to the first they pass through the gates:
//    d(log a_i) = F_i * dF_i + sum_(j < i) K_ij * dK_ij, dF_(i-1) += a_i dF_i, dK_(i-1)j += a_i dK_ij.
// 7. dS <- F_C dS + (F * Q)^T dO, which is kept in both layouts.
// At the end:
// 8. Write the gradient of the initial state.
#include "gla_delta.h"
#include "gla_states.h"
#include "kernels.h"

namespace UNROLLED_ISA {
namespace {

// Key heads of one sequence, from chunk to chunk, as in the forward pass.
class Heads : BackwardStates {
  public:
    Heads(const Gla& x, const GlaGradients& out, const Sequence& s, Int first, Int last, Workspace& memory)
        : BackwardStates(x, s, first, last, memory),
          x_(x),
          out_(out),
          keys_(x, memory),
          queries_(x, memory),
          corrections_(x, memory),
          d_o_(memory.rows(queries_.readers * GLA_CHUNK, M_)),
          d_weights_{memory.zeros(queries_.readers * GLA_CHUNK * GLA_CHUNK), GLA_CHUNK},
          d_keys_(memory.rows(GLA_CHUNK, R_)),
          d_reading_keys_(memory.rows(GLA_CHUNK, R_)),
          d_from_start_(memory.rows(GLA_CHUNK, R_)),
          read_(memory.rows(GLA_CHUNK, R_)),
          d_values_(memory.rows(GLA_CHUNK, M_)),
          row_(memory.floats(R_)) {}

    void run() {
        const Int chunks = ceil_div(s_.keys, GLA_CHUNK);
        // 1. States before the spans.
        if (x_.rates) correct(chunks);
        for_heads([&] { read_states(); });
        for (Int c = 0; !x_.rates && c < (chunks - 1) / SPAN * SPAN; ++c)
            for_heads([&] {
                const Int span = c / SPAN;
                advance(c, c % SPAN ? state(0) : kept(span),
                        c % SPAN == SPAN - 1 ? kept(span + 1) : state(0));
            });
        // 2. to 7. The chunks, from the last to the first.
        go_back(
            chunks, [&](Int c, Rows from, Rows to) { advance(c, from, to); },
            [&](Int c, Rows before) { backward(c, before); });
        // 8. Gradient of the initial state.
        for_heads([&] { write_state(out_.d_state); });
    }

  private:
    // Solves for the corrections of all chunks, from state to state. The states lie where dS is later.
    void correct(Int chunks) {
        for_heads([&] { read_state(x_.state); });
        for (Int c = 0; c < chunks; ++c)
            for_heads([&] {
                if (c % SPAN == 0) transpose_d_state(kept(c / SPAN));
                read_keys(c);
                prefetch(c, c + 1, false,
                         ceil_div(x_.values, TILE_VECS * WIDTH) * ceil_div(x_.features, TILE_ROWS));
                for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH) {
                    corrections_.solve(keys_, queries_, d_state_, m);
                    keys_.update(d_state_, m, prefetcher_);
                }
                for (Int i = 0; i < keys_.n; ++i)
                    write_row(FLOAT32, row(corrections_.residuals, i), x_.values, residual(c, i));
            });
        corrected_ = true;
    }

    float* residual(Int chunk, Int i) const {
        const Int token = s_.first_key + chunk * GLA_CHUNK + i;
        return out_.residuals + place(token, x_.groups, group_) * x_.values;
    }

    void read_states() {
        read_state(out_.state);
        transpose_d_state(d_state_T_);
        if (spans_ && !x_.rates)
            transpose_state(x_.features, x_.values, x_.state + place_in_states(), x_.values, kept(0));
    }

    void read_keys(Int chunk) {
        const Int t = chunk * GLA_CHUNK;
        keys_.read(s_, s_.first_key + t, min(GLA_CHUNK, s_.keys - t), group_);
        if (!x_.rates) return;
        corrections_.read(s_, s_.first_key + t, group_, keys_, queries_);
        if (!corrected_) return;
        for (Int i = 0; i < keys_.n; ++i)
            read_row(FLOAT32, residual(chunk, i), x_.values, row(corrections_.residuals, i));
        corrections_.restore(keys_);
    }

    // Requests the rows of the next head, which may be the first one of chunk `after`, in `calls` shares. The
    // rows of dO and of the queries are requested only with `all`.
    void prefetch(Int chunk, Int after, bool all, Int calls) {
        prefetcher_.clear();
        const Int group = group_ + 1 < last_ ? group_ + 1 : first_;
        const Int t = (group == first_ ? after : chunk) * GLA_CHUNK, first = s_.first_key + t;
        const Int n = t < 0 ? 0 : min(GLA_CHUNK, s_.keys - t);
        for (Int p = 0; all && p < queries_.heads; ++p)
            prefetch_rows(prefetcher_, out_.o, x_.type, s_.batch, first, group * queries_.heads + p, n,
                          x_.values);
        if (all) queries_.prefetch(prefetcher_, s_, first, n, group);
        keys_.prefetch(prefetcher_, s_, first, n, group);
        prefetcher_.spread_over(calls);
    }

    // Computes the transposed state after a chunk from the transposed state before it.
    void advance(Int chunk, Rows from, Rows to) {
        read_keys(chunk);
        prefetch(chunk, chunk + 1, false, ceil_div(x_.values, TILE_ROWS));
        const Rows keys = keys_.last();
        for (Int m = 0; m < x_.values; m += TILE_ROWS) {
            prefetcher_.issue();
            for (Int r = 0; r < x_.features; r += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, x_.values - m), x_.features - r,
                          [&](auto tile) __attribute__((always_inline)) {
                              tile.add_product({keys_.values.data + m, 1, keys_.values.row}, keys.data + r,
                                               keys.row, keys_.n);
                              tile.add_scaled_cols(row(from, m) + r, from.row, keys_.decay() + r);
                              tile.write(row(to, m) + r, to.row);
                          });
        }
    }

    void backward(Int chunk, Rows state_T) {
        // 3. Inputs.
        const Int token = s_.first_key + chunk * GLA_CHUNK;
        read_keys(chunk);
        queries_.read(s_, token, group_, keys_);
        for (Int p = 0; p < queries_.heads; ++p)
            for (Int i = 0; i < keys_.n; ++i) {
                float* d_o = queries_.of(d_o_, p, i);
                read_row(x_.type, address(out_.o, x_.type, s_.batch, token + i, group_ * queries_.heads + p),
                         x_.values, d_o);
                dots(d_o, keys_.values, i + 1, x_.values, queries_.of(d_weights_, p, i));
            }
        prefetch(chunk, chunk - 1, true, ceil_div(x_.features, TILE_ROWS) + ceil_div(x_.values, TILE_ROWS));
        compute_d_values();
        if (x_.rates) solve_back(token);
        for (Int j = 0; j < keys_.n; ++j)
            write(out_.d_v, token + j, x_.groups, group_, x_.values, row(d_values_, j));
        compute_d_queries(token, state_T);
        compute_d_keys(token);
        update_d_state();
    }

    // 4. dV = W^T dO + K_C dS
    void compute_d_values() {
        const Rows keys = keys_.last();
        for (Int j = 0; j < keys_.n; j += TILE_ROWS)
            for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, keys_.n - j), x_.values - m,
                          [&](auto tile) __attribute__((always_inline)) {
                              tile.add_product({row(keys, j), keys.row, 1}, d_state_.data + m, M_,
                                               x_.features);
                              for (Int p = 0; p < queries_.heads; ++p)
                                  tile.add_product({queries_.of(queries_.weights, p, 0) + j, 1, GLA_CHUNK},
                                                   queries_.of(d_o_, p, 0) + m, M_, keys_.n);
                              tile.write(row(d_values_, j) + m, M_);
                          });
    }

    // From the gradients of the corrections to those of the values and rates; also dO and dW of the keys that
    // read.
    void solve_back(Int token) {
        float d_rates[GLA_CHUNK];
        corrections_.solve_back(keys_, queries_, d_values_, d_rates);
        for (Int i = 0; i < keys_.n; ++i) {
            out_.d_rates[place(token + i, x_.groups, group_)] = d_rates[i];
            float* d_o = queries_.of(d_o_, queries_.heads, i);
            for (Int m = 0; m < M_; m += WIDTH) store(d_o + m, -load(row(d_values_, i) + m));
            dots(d_o, keys_.values, i, x_.values, queries_.of(d_weights_, queries_.heads, i));
        }
    }

    // 5. dQ and dF
    void compute_d_queries(Int token, Rows state_T) {
        for (Int p = 0; p < queries_.readers; ++p) {
            for (Int i = 0; i < keys_.n; i += TILE_ROWS)
                multiply_few_rows(min(TILE_ROWS, keys_.n - i), x_.features, x_.values,
                                  {queries_.of(d_o_, p, i), M_, 1}, state_T, {row(read_, i), R_}, false);
            for (Int i = 0; i < keys_.n; ++i) {
                const float *weights = queries_.of(d_weights_, p, i), *q = queries_.of(queries_.rows, p, i);
                float* to = p < queries_.heads ? row_ : row(d_reading_keys_, i);
                for (Int r = 0; r < x_.features; r += WIDTH) {
                    const Vec read = load(row(read_, i) + r);
                    float* d_from_start = row(d_from_start_, i) + r;
                    store(d_from_start, (p ? load(d_from_start) : Vec{}) + load(q + r) * read);
                    Vec d_q = load(row(keys_.from_start, i) + r) * read;
                    for (Int j = 0; j <= i; ++j) d_q += broadcast(weights[j]) * load(keys_.at(i, j) + r);
                    store(to + r, d_q);
                }
                if (p < queries_.heads)
                    write(out_.d_q, token + i, x_.heads, group_ * queries_.heads + p, x_.features, row_);
            }
        }
        add_decay_gradient(state_T, row(d_from_start_, keys_.n - 1));
    }

    // 6. dK, and what passes through the gates
    void compute_d_keys(Int token) {
        for (Int j = 0; j < keys_.n; j += TILE_ROWS)
            multiply_few_rows(min(TILE_ROWS, keys_.n - j), x_.features, x_.values,
                              {row(keys_.values, j), keys_.values.row, 1}, d_state_T_, {row(d_keys_, j), R_},
                              false);
        for (Int i = keys_.n - 1; i >= 0; --i) {
            for (Int r = 0; r < x_.features; r += WIDTH) {
                const Vec gate = load(row(keys_.gates, i) + r),
                          d_from_start = load(row(d_from_start_, i) + r);
                Vec d_log_decay = load(row(keys_.from_start, i) + r) * d_from_start;
                for (Int j = 0; j <= i; ++j) {
                    Vec d_key = load(row(d_keys_, j) + r);
                    for (Int p = 0; p < queries_.readers; ++p)
                        d_key += broadcast(queries_.of(d_weights_, p, i)[j]) *
                                 load(queries_.of(queries_.rows, p, i) + r);
                    if (j < i) d_log_decay += load(keys_.at(i, j) + r) * d_key;
                    store(row(d_keys_, j) + r, j < i ? gate * d_key : d_key);
                }
                store(row_ + r, d_log_decay);
                if (x_.rates) {
                    float* d_key = row(d_keys_, i) + r;
                    store(d_key, load(d_key) + load(row(d_reading_keys_, i) + r));
                }
                if (i) {
                    float* before = row(d_from_start_, i - 1) + r;
                    store(before, load(before) + gate * d_from_start);
                }
            }
            write(out_.d_k, token + i, x_.groups, group_, x_.features, row(d_keys_, i));
            write_row(FLOAT32, row_, x_.features,
                      out_.d_log_decay + place(token + i, x_.groups, group_) * x_.features);
        }
    }

    // 7. dS <- F_C dS + (F * Q)^T dO in both layouts
    void update_d_state() {
        const Rows q = queries_.decayed;
        for (Int r = 0; r < x_.features; r += TILE_ROWS) {
            prefetcher_.issue();
            for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, x_.features - r), x_.values - m,
                          [&](auto tile) __attribute__((always_inline)) {
                              for (Int p = 0; p < queries_.readers; ++p)
                                  tile.add_product({queries_.of(q, p, 0) + r, 1, q.row},
                                                   queries_.of(d_o_, p, 0) + m, M_, keys_.n);
                              tile.add_scaled_rows(row(d_state_, r) + m, M_, keys_.decay() + r);
                              tile.write(row(d_state_, r) + m, M_);
                          });
        }
        for (Int m = 0; m < x_.values; m += TILE_ROWS) {
            prefetcher_.issue();
            for (Int r = 0; r < x_.features; r += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, x_.values - m), x_.features - r,
                          [&](auto tile) __attribute__((always_inline)) {
                              for (Int p = 0; p < queries_.readers; ++p)
                                  tile.add_product({queries_.of(d_o_, p, 0) + m, 1, M_},
                                                   queries_.of(q, p, 0) + r, q.row, keys_.n);
                              tile.add_scaled_cols(row(d_state_T_, m) + r, R_, keys_.decay() + r);
                              tile.write(row(d_state_T_, m) + r, R_);
                          });
        }
    }

    Int place(Int token, Int heads, Int head) const { return (s_.batch * x_.keys + token) * heads + head; }
    // Writes a row of a result [batch, tokens, heads, width].
    void write(void* to, Int token, Int heads, Int head, Int width, const float* from) const {
        write_row(x_.type, from, width, (char*)to + place(token, heads, head) * width * size_of(x_.type));
    }

    const Gla& x_;
    const GlaGradients& out_;
    bool corrected_ = false;  // whether the residuals of all chunks are known
    DecayedKeys keys_;
    DecayedQueries queries_;
    DecayedCorrections corrections_;
    Prefetcher prefetcher_;
    Rows d_o_, d_weights_;
    Rows d_keys_, d_reading_keys_, d_from_start_, read_, d_values_;
    float* row_;
};

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(gla_backward)(const Gla* x, const GlaGradients* out) {
    advise_huge_pages(*x, out->d_q, x->queries, x->heads, x->features);
    advise_huge_pages(*x, out->d_k, x->keys, x->groups, x->features);
    advise_huge_pages(*x, out->d_v, x->keys, x->groups, x->values);
    const GlaPlan plan(*x, SPAN);
    return parallel_for(x->sequences * plan.blocks, plan.threads, [&](Int i) {
        const FlushSubnormals flush(true);
        const Int first = i % plan.blocks * plan.heads, last = min(x->groups, first + plan.heads);
        Workspace memory;
        Heads heads(*x, *out, sequence_at(*x, i / plan.blocks), first, last, memory);
        if (memory.failed()) return OUT_OF_MEMORY;
        heads.run();
        return SUCCESS;
    });
}
