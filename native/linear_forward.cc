// Linear attention, forward, in one pass over the sequence. Nothing larger than a chunk is written but the
// output. The letters are those of `linear_chunk.h`.
//
// 1. Compute the states before the segments, where there are any (`linear_plan.h`).
// For each chunk of a segment and each key head, with its state kept from chunk to chunk:
// 2. Read the keys, values and gates. With the delta rule the values are replaced (`delta_chunk.h`).
// For each query head that reads them:
// 3. Read and transpose the queries, and compute the scores P^T.
// 4. Compute the divisors den = P 1 + exp(b) Q z.
// 5. Compute O = (P V + exp(b) Q S) / den, tile by tile in registers, and write it.
// And again for the key head:
// 6. Update the state: S' = exp(b_C) S + K^T (exp(b_C - b) V), and z' alike.
// At the end:
// 7. Write the final state.
//
// Bidirectional attention has the final state after phase 1, and runs phases 3, 4, 5 without scores.
#include "delta_chunk.h"
#include "kernels.h"
#include "linear_plan.h"

namespace UNROLLED_ISA {
namespace {

// Phases 3 to 5 for the queries of one chunk of one head. If causal, queries and scores are kept transposed,
// so that a sum over keys, the divisor, is a sum of whole vectors: one lane for each query.
class Queries {
  public:
    Queries(const Linear& x, const LinearOutputs& out, Workspace& memory)
        : x_(x),
          out_(out),
          longest_(chunk_length(x)),
          rows_(x, Side::QUERIES, longest_, memory, x.unit_epsilon > 0),
          q_T_{memory.zeros(round_up(x.features) * longest_), longest_},
          scores_T_(memory.rows(longest_, longest_)),
          divisor_(memory.floats(longest_)),
          factors_(memory.floats(longest_)),
          o_(memory.rows(TILE_ROWS, round_up(x.values))) {}

    // Queries [token, token + n) attend to `state` and to the keys of `chunk` up to themselves; without
    // `chunk` to `state` alone.
    void attend(const Sequence& s, Int token, Int n, Int head, State state, const KeyChunk* chunk,
                Prefetcher& prefetcher) {
        // 3. Queries and scores.
        const Rows q = rows_.read(s.batch, token, head, n);
        if (x_.unit_epsilon > 0) make_unit_rows(x_, q, n, x_.query_scale);
        const float* from_start = chunk ? chunk->gates.from_start : nullptr;
        Strided left{q.data, q.row, 1};
        if (chunk) {
            transpose(n, x_.features, q.data, q.row, q_T_);
            left = {q_T_.data, 1, q_T_.row};
            score(chunk->gates, n, x_.features, chunk->keys, q_T_, scores_T_, prefetcher);
        }
        // 4. Divisors.
        if (x_.normalize) {
            if (chunk) compute_divisors(n, state.k_sum, from_start);
            else
                for (Int i = 0; i < n; ++i) divisor_[i] = dot(q.data + i * q.row, state.k_sum, x_.features);
            for (Int i = 0; i < n; ++i) factors_[i] = divisible(divisor_[i]) ? 1 / divisor_[i] : 0;
        }
        // 5. Outputs. A tile passes through two products, the division and the write without leaving
        // registers.
        const bool direct = usable(x_.type, x_.values);
        const Int row = (s.batch * x_.queries + token) * x_.heads + head;
        for (Int i = 0; i < n; i += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, n - i), first = row + i * x_.heads;
            const Rows o = direct ? Rows{(float*)out_.o + first * x_.values, x_.heads * x_.values} : o_;
            prefetcher.issue();
            for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH)
                with_tile(rows, x_.values - m, [&](auto tile) {
                    tile.add_product({left.data + i * left.row, left.row, left.col}, state.kv.data + m,
                                     state.kv.row, x_.features);
                    if (from_start) tile.scale_rows(from_start + i);
                    if (chunk)
                        tile.add_product({scores_T_.data + i, 1, scores_T_.row}, chunk->values.data + m,
                                         chunk->values.row, i + rows);
                    if (x_.normalize) tile.scale_rows(factors_ + i);
                    tile.write(o.data + m, o.row);
                });
            for (Int a = 0; a < rows; ++a) {
                const Int at = first + a * x_.heads;
                if (x_.normalize) {
                    out_.divisor[at] = divisor_[i + a];
                    // Multiplying by a factor of 0 would keep an infinite or NaN numerator.
                    if (!divisible(divisor_[i + a]))
                        std::memset(o.data + a * o.row, 0, (size_t)x_.values * 4);
                }
                if (!direct)
                    write_row(x_.type, o.data + a * o.row, x_.values,
                              (char*)out_.o + at * x_.values * size_of(x_.type));
            }
        }
    }

  private:
    // den = P 1 + exp(b) Q z, for a vector of queries at a time.
    void compute_divisors(Int n, const float* k_sum, const float* from_start) {
        for (Int i = 0; i < n; i += WIDTH) {
            Vec parts[4]{};  // independent sums, which hide the latency of an addition
            for (Int r = 0; r < x_.features; r += 4)
                for (int a = 0; a < 4; ++a)
                    parts[a] += load(q_T_.data + (r + a) * q_T_.row + i) * broadcast(k_sum[r + a]);
            Vec total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
            if (from_start) total *= load(from_start + i);
            Vec scores{};
            for (Int j = 0; j < min(n, i + WIDTH); ++j)
                scores += load(scores_T_.data + j * scores_T_.row + i);
            store(divisor_ + i, total + scores);
        }
    }

    const Linear& x_;
    const LinearOutputs& out_;
    const Int longest_;
    FeatureRows rows_;
    Rows q_T_, scores_T_;
    float *divisor_, *factors_;
    Rows o_;
};

// Adds the queries and outputs of a chunk to what a prefetcher requests; returns how often `attend` calls
// `issue`.
Int prefetch_queries(Prefetcher& prefetcher, const Linear& x, const LinearOutputs& out, const Sequence& s,
                     HeadChunk i) {
    const Int token = s.first_query + i.token;
    for_heads(x, i.group, [&](Int h) {
        prefetch_rows(prefetcher, contiguous(out.o, x.queries, x.heads, x.values), x.type, s.batch, token, h,
                      i.n, x.values);
        prefetch_rows(prefetcher, x.q, x.type, s.batch, token, h, i.n, input_width(x));
    });
    return x.heads / x.groups * ceil_div(i.n, TILE_ROWS) * (x.causal ? 2 : 1);
}

Status causal_task(const Linear& x, const LinearOutputs& out, const LinearTask& task, const States& states) {
    Workspace memory;
    KeyChunk chunk(x, false, x.log_decay || x.rates, memory);
    Corrections corrections(x, memory);
    Queries queries(x, out, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Sequence& s = task.sequence;
    Prefetcher prefetcher;
    const auto prepare = [&](Prefetcher& next, HeadChunk i) {
        const Int calls = prefetch_queries(next, x, out, s, i);
        prefetch_rows(next, x.v, x.type, s.batch, s.first_key + i.token, i.group, i.n, x.values);
        prefetch_rows(next, x.k, x.type, s.batch, s.first_key + i.token, i.group, i.n, input_width(x));
        next.spread_over(calls + ceil_div(x.features, TILE_ROWS));
    };
    for_chunks(x, task, Order::FORWARDS, task.from(s.keys), task.to(s.keys), prefetcher, prepare,
               [&](HeadChunk i) {
                   const State state = states.of(s.index, task.segment, i.group);
                   // 2. Keys, values and gates.
                   chunk.read(s, s.first_key + i.token, i.n, i.group);
                   if (x.rates) corrections.solve(s, chunk, i.group, state, Layout::PLAIN, prefetcher);
                   for_heads(x, i.group, [&](Int head) {
                       queries.attend(s, chunk.token, i.n, head, state, &chunk, prefetcher);
                   });
                   // 6. State update.
                   chunk.update(state, state, prefetcher);
               });
    return SUCCESS;
}

Status bidirectional_task(const Linear& x, const LinearOutputs& out, const LinearTask& task,
                          const States& states, Int segments) {
    Workspace memory;
    Queries queries(x, out, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Sequence& s = task.sequence;
    Prefetcher prefetcher;
    const auto prepare = [&](Prefetcher& next, HeadChunk i) {
        next.spread_over(prefetch_queries(next, x, out, s, i));
    };
    for_chunks(x, task, Order::FORWARDS, task.from(s.queries), task.to(s.queries), prefetcher, prepare,
               [&](HeadChunk i) {
                   const State state = states.of(s.index, segments, i.group);
                   for_heads(x, i.group, [&](Int head) {
                       queries.attend(s, s.first_query + i.token, i.n, head, state, nullptr, prefetcher);
                   });
               });
    return SUCCESS;
}

Status run(const Linear& x, const LinearOutputs& out) {
    advise_huge_pages(x, out.o, x.queries, x.heads, x.values);
    Workspace memory;
    // 1. States before the segments.
    const Plan plan(x, !x.rates, 1);
    const States states(x, plan, Layout::PLAIN, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Status computed =
        compute_states(x, plan, states, !x.causal, [](const Sequence&, HeadChunk, State) {});
    if (computed != SUCCESS) return computed;
    return parallel_for(plan.tasks(x), plan.threads, [&](Int i) {
        const FlushSubnormals flush(x.log_decay);
        const LinearTask task(x, plan, i);
        const Status status = x.causal ? causal_task(x, out, task, states)
                                       : bidirectional_task(x, out, task, states, plan.segments);
        if (status != SUCCESS) return status;
        // 7. The state of the last causal task has seen all keys.
        if (task.last)
            for (Int g = task.first_head; g < task.last_head; ++g)
                write_state(x, states.of(task.sequence.index, x.causal ? task.segment : plan.segments, g),
                            task.sequence.index * x.groups + g, out.kv, out.k_sum);
        return SUCCESS;
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(linear_forward)(const Linear* x, const LinearOutputs* out) {
    return UNROLLED_ISA::run(*x, *out);
}
