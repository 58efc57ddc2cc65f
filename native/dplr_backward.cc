// The rule of a diagonal plus low rank, backward. The letters are those of `dplr_chunk.h`; dX is the gradient
// of X. As in `gla_backward.cc`, only a few states are kept, and those between them are computed again.
//
// For each sequence and head:
// 1. Compute the reads U of all chunks and keep them, and the state before each span, transposed.
// For each span, from the last to the first:
// 2. Compute the states before its chunks again.
// For each of its chunks, from the last to the first, with dS after it:
// 3. Read the inputs and dO, and compute K, B and the weights.
// 4. dU = (Q . B)^T dO + B_C dS, and then the transposed system of the reads.
// 5. dV = (Q . K)^T dO + (A . K)^T dU + K_C dS.
// 6. The gradients of the weights: dO V^T, dO U^T, dU V^T, dU U^T below the diagonals.
// 7. dQ_i = F_i * (dO_i S^T) + sum_j (dO V^T)_ij K_ij + (dO U^T)_ij B_ij, and dF_i = Q_i * (dO_i S^T); the
//    same for A, one token behind. dF_C also has the sums of the rows of S * dS.
// 8. dK_C = V dS^T, and dK_ij gets the gradients of the weights times what reads it. From the last token to
//    the first they pass through the gates: dF_(i-1) += a_i dF_i, dK_(i-1)j += a_i dK_ij, and
//    d(log a_i) = F_i * dF_i + sum_(j < i) K_ij * dK_ij + B_ij * dB_ij. The same for B, with U for V.
// 9. dS <- F_C dS + (F * Q)^T dO + (F * A)^T dU, which is kept in both layouts.
// At the end:
// 10. Write the gradient of the initial state.
#include "dplr_chunk.h"
#include "gla_states.h"
#include "kernels.h"

namespace UNROLLED_ISA {
namespace {

// The gradients of what the rows of `Readers` compute.
struct Reading {
    Reading(Int values, Workspace& memory)
        : results(memory.rows(GLA_CHUNK, values)),
          of_values{memory.zeros(GLA_CHUNK * GLA_CHUNK), GLA_CHUNK},
          of_reads{memory.zeros(GLA_CHUNK * GLA_CHUNK), GLA_CHUNK} {}

    // 6. From the gradients of the results to those of the weights.
    void weigh(const Readers& readers, const KeyPairs& keys, Int values) const {
        for (Int i = readers.behind; i < keys.k.n; ++i) {
            dots(row(results, i), keys.k.values, readers.count(i), values, row(of_values, i));
            dots(row(results, i), keys.b.values, readers.count(i), values, row(of_reads, i));
        }
    }

    Rows results, of_values, of_reads;
};

// Heads of one sequence, from chunk to chunk, as in the forward pass.
class Heads : BackwardStates {
  public:
    Heads(const Dplr& x, const Gla& gla, const DplrGradients& out, const Sequence& s, Int first, Int last,
          Workspace& memory)
        : BackwardStates(gla, s, first, last, memory),
          x_(x),
          out_(out),
          keys_(x, gla, memory),
          queries_(x, x.q, 0, memory),
          reads_(x, memory),
          d_o_(M_, memory),
          d_reads_(M_, memory),
          d_k_(memory.rows(GLA_CHUNK, R_)),
          d_b_(memory.rows(GLA_CHUNK, R_)),
          d_from_start_(memory.rows(GLA_CHUNK, R_)),
          read_(memory.rows(GLA_CHUNK, R_)),
          d_values_(memory.rows(GLA_CHUNK, M_)),
          row_(memory.floats(R_)) {}

    void run() {
        const Int chunks = ceil_div(s_.keys, GLA_CHUNK);
        // 1. Reads, and states before the spans. The states lie where dS is later.
        for_heads([&] { read_state(x_.state); });
        for (Int c = 0; c < chunks; ++c) for_heads([&] { compute_reads(c); });
        for_heads([&] {
            read_state(out_.state);
            transpose_d_state(d_state_T_);
        });
        // 2. to 9. The chunks, from the last to the first.
        go_back(
            chunks, [&](Int c, Rows from, Rows to) { advance(c, from, to); },
            [&](Int c, Rows before) { backward(c, before); });
        // 10. Gradient of the initial state.
        for_heads([&] { write_state(out_.d_state); });
    }

  private:
    Int token_of(Int chunk) const { return s_.first_key + chunk * GLA_CHUNK; }
    Int place(Int token) const { return (s_.batch * x_.tokens + token) * x_.heads + group_; }
    float* kept_read(Int chunk, Int i) const { return out_.reads + place(token_of(chunk) + i) * x_.values; }

    void read_keys(Int chunk) {
        const Int t = chunk * GLA_CHUNK;
        keys_.read(s_, s_.first_key + t, min(GLA_CHUNK, s_.keys - t), group_);
    }

    void compute_reads(Int chunk) {
        if (chunk % SPAN == 0) transpose_d_state(kept(chunk / SPAN));
        read_keys(chunk);
        reads_.read(s_, token_of(chunk), group_, keys_);
        prefetch(chunk, chunk + 1, false,
                 ceil_div(x_.values, TILE_VECS * WIDTH) * ceil_div(x_.features, TILE_ROWS));
        for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH) {
            reads_.solve(keys_, d_state_, m);
            keys_.update(d_state_, m, prefetcher_);
        }
        for (Int i = 0; i < keys_.k.n; ++i)
            write_row(FLOAT32, row(keys_.b.values, i), x_.values, kept_read(chunk, i));
    }

    void read_keys_and_reads(Int chunk) {
        read_keys(chunk);
        for (Int i = 0; i < keys_.k.n; ++i)
            read_row(FLOAT32, kept_read(chunk, i), x_.values, row(keys_.b.values, i));
    }

    // Requests the rows of the next head, which may be the first one of chunk `after`, in `calls` shares. The
    // rows of dO and of the queries are requested only with `all`.
    void prefetch(Int chunk, Int after, bool all, Int calls) {
        prefetcher_.clear();
        const Int head = group_ + 1 < last_ ? group_ + 1 : first_;
        const Int t = (head == first_ ? after : chunk) * GLA_CHUNK, first = s_.first_key + t;
        const Int n = t < 0 ? 0 : min(GLA_CHUNK, s_.keys - t);
        if (all) {
            prefetch_rows(prefetcher_, out_.o, x_.type, s_.batch, first, head, n, x_.values);
            queries_.prefetch(prefetcher_, s_, first, n, head);
        }
        reads_.a.prefetch(prefetcher_, s_, first, n, head);
        keys_.prefetch(prefetcher_, s_, first, n, head);
        prefetcher_.spread_over(calls);
    }

    // Computes the transposed state after a chunk from the transposed state before it.
    void advance(Int chunk, Rows from, Rows to) {
        read_keys_and_reads(chunk);
        prefetch(chunk, chunk + 1, false, ceil_div(x_.values, TILE_ROWS));
        for (Int m = 0; m < x_.values; m += TILE_ROWS) {
            prefetcher_.issue();
            for (Int r = 0; r < x_.features; r += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, x_.values - m), x_.features - r,
                          [&](auto tile) __attribute__((always_inline)) {
                              tile.add_product({keys_.k.values.data + m, 1, keys_.k.values.row},
                                               keys_.k.last().data + r, R_, keys_.k.n);
                              tile.add_product({keys_.b.values.data + m, 1, M_}, keys_.b.last().data + r, R_,
                                               keys_.k.n);
                              tile.add_scaled_cols(row(from, m) + r, R_, keys_.k.decay() + r);
                              tile.write(row(to, m) + r, R_);
                          });
        }
    }

    void backward(Int chunk, Rows state_T) {
        // 3. Inputs.
        const Int token = token_of(chunk);
        read_keys_and_reads(chunk);
        queries_.read(s_, token, group_, keys_);
        reads_.read(s_, token, group_, keys_);
        read_rows(out_.o, x_.type, s_.batch, token, group_, keys_.k.n, x_.values, d_o_.results);
        prefetch(chunk, chunk - 1, true, ceil_div(x_.features, TILE_ROWS) + ceil_div(x_.values, TILE_ROWS));
        compute_d_reads();
        compute_d_values(token);
        d_o_.weigh(queries_, keys_, x_.values);
        d_reads_.weigh(reads_.a, keys_, x_.values);
        compute_d_readers(token, state_T);
        compute_d_keys(token);
        update_d_state();
    }

    // 4. dU
    void compute_d_reads() {
        const Rows d_u = d_reads_.results;
        for (Int j = 0; j < keys_.k.n; j += TILE_ROWS)
            for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, keys_.k.n - j), x_.values - m,
                          [&](auto tile) __attribute__((always_inline)) {
                              tile.add_product({row(keys_.b.last(), j), R_, 1}, d_state_.data + m, M_,
                                               x_.features);
                              tile.add_product({queries_.of_reads.data + j, 1, GLA_CHUNK},
                                               d_o_.results.data + m, M_, keys_.k.n);
                              tile.write(row(d_u, j) + m, M_);
                          });
        reads_.solve_back(d_u, keys_.k.n);
    }

    // 5. dV
    void compute_d_values(Int token) {
        for (Int j = 0; j < keys_.k.n; j += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, keys_.k.n - j);
            for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH)
                with_tile(rows, x_.values - m, [&](auto tile) __attribute__((always_inline)) {
                    tile.add_product({row(keys_.k.last(), j), R_, 1}, d_state_.data + m, M_, x_.features);
                    tile.add_product({queries_.of_values.data + j, 1, GLA_CHUNK}, d_o_.results.data + m, M_,
                                     keys_.k.n);
                    tile.add_product({reads_.a.of_values.data + j, 1, GLA_CHUNK}, d_reads_.results.data + m,
                                     M_, keys_.k.n);
                    tile.write(row(d_values_, j) + m, M_);
                });
        }
        for (Int j = 0; j < keys_.k.n; ++j) write(out_.d_v, token + j, x_.values, row(d_values_, j));
    }

    // 7. dQ, dA and dF
    void compute_d_readers(Int token, Rows state_T) {
        for (Int i = 0; i < keys_.k.n; ++i) std::memset(row(d_from_start_, i), 0, (size_t)R_ * 4);
        compute_d_rows(queries_, d_o_, state_T, token, out_.d_q);
        compute_d_rows(reads_.a, d_reads_, state_T, token, out_.d_a);
        add_decay_gradient(state_T, row(d_from_start_, keys_.k.n - 1));
    }

    void compute_d_rows(const Readers& readers, const Reading& d, Rows state_T, Int token, void* to) {
        for (Int i = 0; i < keys_.k.n; i += TILE_ROWS)
            multiply_few_rows(min(TILE_ROWS, keys_.k.n - i), x_.features, x_.values,
                              {row(d.results, i), M_, 1}, state_T, {row(read_, i), R_}, false);
        for (Int i = 0; i < keys_.k.n; ++i) {
            const Int last = i - readers.behind;  // the last token that row i reads
            const float *of_values = row(d.of_values, i), *of_reads = row(d.of_reads, i);
            for (Int r = 0; r < x_.features; r += WIDTH) {
                const Vec read = load(row(read_, i) + r);
                Vec d_row = read;
                if (last >= 0) {
                    float* d_from_start = row(d_from_start_, last) + r;
                    store(d_from_start, load(d_from_start) + load(row(readers.rows, i) + r) * read);
                    d_row *= load(row(keys_.k.from_start, last) + r);
                }
                for (Int j = 0; j <= last; ++j)
                    d_row += broadcast(of_values[j]) * load(keys_.k.at(last, j) + r) +
                             broadcast(of_reads[j]) * load(keys_.b.at(last, j) + r);
                store(row_ + r, d_row);
            }
            write(to, token + i, x_.features, row_);
        }
    }

    // 8. dK, dB, and what passes through the gates
    void compute_d_keys(Int token) {
        const Int n = keys_.k.n;
        for (Int j = 0; j < n; j += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, n - j);
            multiply_few_rows(rows, x_.features, x_.values, {row(keys_.k.values, j), keys_.k.values.row, 1},
                              d_state_T_, {row(d_k_, j), R_}, false);
            multiply_few_rows(rows, x_.features, x_.values, {row(keys_.b.values, j), M_, 1}, d_state_T_,
                              {row(d_b_, j), R_}, false);
        }
        for (Int i = n - 1; i >= 0; --i) {
            for (Int r = 0; r < x_.features; r += WIDTH) {
                const Vec gate = load(row(keys_.k.gates, i) + r),
                          d_from_start = load(row(d_from_start_, i) + r);
                Vec d_log_decay = load(row(keys_.k.from_start, i) + r) * d_from_start;
                pass(keys_.k, d_k_, d_o_.of_values, d_reads_.of_values, i, r, gate, d_log_decay);
                pass(keys_.b, d_b_, d_o_.of_reads, d_reads_.of_reads, i, r, gate, d_log_decay);
                store(row_ + r, d_log_decay);
                if (i) {
                    float* before = row(d_from_start_, i - 1) + r;
                    store(before, load(before) + gate * d_from_start);
                }
            }
            write(out_.d_k, token + i, x_.features, row(d_k_, i));
            write(out_.d_b, token + i, x_.features, row(d_b_, i));
            write_row(FLOAT32, row_, x_.features, out_.d_log_decay + place(token + i) * x_.features);
        }
    }

    // Adds to the gradients of the keys as token i finds them what reads them there, the query of token i and
    // the vector a of the next token, and takes them through the gate of token i.
    void pass(const DecayedKeys& keys, Rows d_keys, Rows of_query, Rows of_a, Int i, Int r, Vec gate,
              Vec& d_log_decay) const {
        const bool read_next = i + 1 < keys.n;
        const Vec q = load(row(queries_.rows, i) + r),
                  a = read_next ? load(row(reads_.a.rows, i + 1) + r) : Vec{};
        for (Int j = 0; j <= i; ++j) {
            float* at = row(d_keys, j) + r;
            Vec d_key = load(at) + broadcast(row(of_query, i)[j]) * q;
            if (read_next) d_key += broadcast(row(of_a, i + 1)[j]) * a;
            if (j < i) d_log_decay += load(keys.at(i, j) + r) * d_key;
            store(at, j < i ? gate * d_key : d_key);
        }
    }

    // 9. dS in both layouts
    void update_d_state() {
        const Int n = keys_.k.n;
        for (Int r = 0; r < x_.features; r += TILE_ROWS) {
            prefetcher_.issue();
            for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, x_.features - r), x_.values - m,
                          [&](auto tile) __attribute__((always_inline)) {
                              tile.add_product({queries_.decayed.data + r, 1, R_}, d_o_.results.data + m, M_,
                                               n);
                              tile.add_product({reads_.a.decayed.data + r, 1, R_}, d_reads_.results.data + m,
                                               M_, n);
                              tile.add_scaled_rows(row(d_state_, r) + m, M_, keys_.k.decay() + r);
                              tile.write(row(d_state_, r) + m, M_);
                          });
        }
        for (Int m = 0; m < x_.values; m += TILE_ROWS) {
            prefetcher_.issue();
            for (Int r = 0; r < x_.features; r += TILE_VECS * WIDTH)
                with_tile(min(TILE_ROWS, x_.values - m), x_.features - r,
                          [&](auto tile) __attribute__((always_inline)) {
                              tile.add_product({d_o_.results.data + m, 1, M_}, queries_.decayed.data + r, R_,
                                               n);
                              tile.add_product({d_reads_.results.data + m, 1, M_}, reads_.a.decayed.data + r,
                                               R_, n);
                              tile.add_scaled_cols(row(d_state_T_, m) + r, R_, keys_.k.decay() + r);
                              tile.write(row(d_state_T_, m) + r, R_);
                          });
        }
    }

    // Writes a row of a result [batch, tokens, heads, width].
    void write(void* to, Int token, Int width, const float* from) const {
        write_row(x_.type, from, width, (char*)to + place(token) * width * size_of(x_.type));
    }

    const Dplr& x_;
    const DplrGradients& out_;
    KeyPairs keys_;
    Readers queries_;
    Reads reads_;
    Prefetcher prefetcher_;
    Reading d_o_, d_reads_;
    Rows d_k_, d_b_, d_from_start_, read_, d_values_;
    float* row_;
};

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(dplr_backward)(const Dplr* x, const DplrGradients* out) {
    advise_huge_pages(*x, out->d_q, x->tokens, x->heads, x->features);
    advise_huge_pages(*x, out->d_k, x->tokens, x->heads, x->features);
    advise_huge_pages(*x, out->d_a, x->tokens, x->heads, x->features);
    advise_huge_pages(*x, out->d_b, x->tokens, x->heads, x->features);
    advise_huge_pages(*x, out->d_v, x->tokens, x->heads, x->values);
    const Gla gla = without_reads(*x);
    const GlaPlan plan(gla, SPAN);
    return parallel_for(x->sequences * plan.blocks, plan.threads, [&](Int i) {
        const FlushSubnormals flush(true);
        const Int first = i % plan.blocks * plan.heads, last = min(x->heads, first + plan.heads);
        Workspace memory;
        Heads heads(*x, gla, *out, sequence_at(gla, i / plan.blocks), first, last, memory);
        if (memory.failed()) return OUT_OF_MEMORY;
        heads.run();
        return SUCCESS;
    });
}
