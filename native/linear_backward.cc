// Linear attention, backward: one pass forwards for the queries, one backwards for the keys, values and
// gates. Scores are recomputed. The gradients of gates and the delta rule need the state before every chunk.
// The first pass then keeps a few of them, and the second computes the others again; otherwise nothing is
// kept. With G = dO / den and the letters of `linear_chunk.h`:
//
// 1. Compute the states before the segments, where there are any (`linear_plan.h`).
// Forwards, for each chunk and each query head:
// 2. dQ' = (D * (G V^T)) K + exp(b) G S^T, and the state is updated as in the forward pass.
// 3. Through the divisors: dden = -(q . dQ') / den and dQ = dQ' + dden ((D K) + exp(b) z).
// 4. Compute the gradients of the states after the segments, as in phase 1 but backwards and from queries.
// Backwards, for each chunk and each key head, with the gradient dS, dz of the state after it:
// 5. Through the state: dK = exp(b_C - b) (V dS^T + dz) and dV = exp(b_C - b) K dS.
// 6. The gradients of the gates that act on the state.
// For each query head, if causal:
// 7. Inside the chunk: dK += dP^T Q and dV += P^T G with dP = D * (G V^T + dden), and the gates between them.
// 8. Gradient of the state before the chunk: dS' = exp(b_C) dS + (exp(b) Q)^T G, dz' alike with dden.
// And with the delta rule, whose corrections N take the place of V:
// 9. From dN to dV and the gradients of the rates. The keys are queries too: they read the state and the
//    earlier keys of the chunk, and -dV is the gradient of what they read.
// At the end:
// 10. The gradient of the initial state is that before the first chunk.
//
// Bidirectional queries all read the final state: phases 2, 3 without scores, then 4, 5, 6.
#include "delta_chunk.h"
#include "kernels.h"
#include "linear_plan.h"

namespace UNROLLED_ISA {
namespace {

bool gate_gradients(const Linear& x, const LinearGradients& out) { return x.log_decay && out.d_log_decay; }

bool keeps_states(const Linear& x, const LinearGradients& out) { return gate_gradients(x, out) || x.rates; }

// One state for every span of every sequence. A packed sequence need not begin at a multiple of the span, so
// there is one state more for each sequence.
Int saved_floats(const Linear& x) {
    const Int tokens = SPAN * chunk_length(x);
    const Int slots = x.offsets ? x.keys / tokens + x.sequences : x.sequences * ceil_div(x.keys, tokens);
    return slots * x.groups * state_floats(x, Layout::TRANSPOSED);
}

// The state before the span of a token.
State saved_state(const Linear& x, const LinearGradients& out, const Sequence& s, Int token, Int group) {
    const Int tokens = SPAN * chunk_length(x);
    const Int first = x.offsets ? s.first_key / tokens + s.index : s.batch * ceil_div(x.keys, tokens);
    return state_at(
        x, Layout::TRANSPOSED,
        out.states + ((first + token / tokens) * x.groups + group) * state_floats(x, Layout::TRANSPOSED));
}

void save_state(const Linear& x, const LinearGradients& out, const Sequence& s, HeadChunk i, State state) {
    if (keeps_states(x, out) && i.token % (SPAN * chunk_length(x)) == 0)
        std::memcpy(saved_state(x, out, s, i.token, i.group).kv.data, state.kv.data,
                    (size_t)state_floats(x, Layout::TRANSPOSED) * 4);
}

float* residual_row(const Linear& x, const LinearGradients& out, Int batch, Int token, Int group) {
    return out.residuals + ((batch * x.keys + token) * x.groups + group) * x.values;
}

void read_correction(const Linear& x, const LinearGradients& out, Int batch, Int token, Int group,
                     float* to) {
    read_row(FLOAT32, residual_row(x, out, batch, token, group), x.values, to);
    scale_row(to, x.values, x.rates[(batch * x.keys + token) * x.groups + group]);
}

// G = dO / den, padded to whole vectors. Dividing first keeps products of extreme inputs in range: keys of
// 1e28 with gradients of 1e8 would overflow if the division came last. It is as fast.
void read_gradient(const Linear& x, const LinearGradients& out, Int batch, Int token, Int head, float* g) {
    read_row(x.type, address(out.o, x.type, batch, token, head), x.values, g);
    if (!x.normalize) return;
    divide_row(g, x.values, out.divisor[(batch * x.queries + token) * x.heads + head]);
}

// Phases 2 and 3 for the queries of one chunk of one head: dQ, and what the pass over the keys needs from
// them. If causal, G and the scores are kept transposed, like Q in the forward pass.
class QueryGradients {
  public:
    QueryGradients(const Linear& x, const LinearGradients& out, Workspace& memory)
        : x_(x),
          out_(out),
          longest_(chunk_length(x)),
          rows_(x, Side::QUERIES, longest_, memory, false),
          g_(memory.rows(longest_, round_up(x.values))),
          g_T_{memory.zeros(round_up(x.values) * longest_), longest_},
          d_scores_T_(memory.rows(longest_, longest_)),
          d_q_(memory.rows(longest_, round_up(x.features))),
          read_(memory.floats(longest_)),
          d_divisors_(memory.floats(longest_)) {}

    // Queries [token, token + n) attended to `state` and to the keys of `chunk` up to themselves; without
    // `chunk` to `state` alone.
    void compute(const Sequence& s, Int token, Int n, Int head, State state, const KeyChunk* chunk,
                 Prefetcher& prefetcher) {
        // 2. dQ', without what comes through the divisors.
        const Rows q = rows_.read(s.batch, token, head, n);
        for (Int i = 0; i < n; ++i) read_gradient(x_, out_, s.batch, token + i, head, g_.data + i * g_.row);
        const float* from_start = chunk ? chunk->gates.from_start : nullptr;
        const bool reads = chunk && gate_gradients(x_, out_);
        Strided left{g_.data, g_.row, 1};
        if (chunk) {
            transpose(n, x_.values, g_.data, g_.row, g_T_);
            left = {g_T_.data, 1, g_T_.row};
            score(chunk->gates, n, x_.values, chunk->values, g_T_, d_scores_T_, prefetcher);
        }
        for (Int i = 0; i < n; ++i) read_[i] = 0;
        for (Int i = 0; i < n; i += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, n - i);
            const Rows d_q = {d_q_.data + i * d_q_.row, d_q_.row};
            prefetcher.issue();
            for (Int r = 0; r < x_.features; r += TILE_VECS * WIDTH)
                with_tile(rows, x_.features - r, [&](auto tile) {
                    tile.add_product({left.data + i * left.row, left.row, left.col}, state.kv.data + r,
                                     state.kv.row, x_.values);
                    if (from_start) tile.scale_rows(from_start + i);
                    if (reads) {
                        tile.write(d_q.data + r, d_q.row);
                        for (Int a = 0; a < rows; ++a)
                            read_[i + a] += dot(q.data + (i + a) * q.row + r, d_q.data + a * d_q.row + r,
                                                min(x_.features - r, TILE_VECS * WIDTH));
                    }
                    if (chunk)
                        tile.add_product({d_scores_T_.data + i, 1, d_scores_T_.row}, chunk->keys.data + r,
                                         chunk->keys.row, i + rows);
                    tile.write(d_q.data + r, d_q.row);
                });
        }
        const Int first = (s.batch * x_.queries + token) * x_.heads + head;
        if (x_.normalize) add_divisor_gradients(q, n, first, state.k_sum, chunk);
        for (Int i = 0; reads && i < n; ++i) out_.d_log_from_start[first + i * x_.heads] = read_[i];
        rows_.write_gradients(n, d_q_, [&](Int i) {
            return (char*)out_.d_q + (first + i * x_.heads) * input_width(x_) * size_of(x_.type);
        });
    }

  private:
    // 3. dden = -(q . dQ') / den and dQ = dQ' + dden ((D K) + exp(b) z).
    void add_divisor_gradients(Rows q, Int n, Int first, const float* k_sum, const KeyChunk* chunk) {
        const float *gate = chunk ? chunk->gates.gate : nullptr,
                    *from_start = chunk ? chunk->gates.from_start : nullptr;
        for (Int i = 0; i < n; ++i) {
            const float divisor = out_.divisor[first + i * x_.heads];
            const float total = dot(q.data + i * q.row, d_q_.data + i * d_q_.row, x_.features);
            d_divisors_[i] = divisible(divisor) ? -total / divisor : 0;
            out_.d_divisor[first + i * x_.heads] = d_divisors_[i];
            if (chunk && gate_gradients(x_, out_))
                read_[i] += d_divisors_[i] * from_start[i] * dot(q.data + i * q.row, k_sum, x_.features);
        }
        for (Int r = 0; r < x_.features; r += WIDTH) {
            const Vec before = load(k_sum + r);
            Vec seen{};
            for (Int i = 0; i < n; ++i) {
                if (gate) seen *= broadcast(gate[i]);
                if (chunk) seen += load(chunk->keys.data + i * chunk->keys.row + r);
                const Vec sum = from_start ? seen + before * broadcast(from_start[i]) : seen + before;
                float* d_q = d_q_.data + i * d_q_.row + r;
                store(d_q, load(d_q) + sum * broadcast(d_divisors_[i]));
            }
        }
    }

    const Linear& x_;
    const LinearGradients& out_;
    const Int longest_;
    FeatureRows rows_;
    Rows g_, g_T_, d_scores_T_, d_q_;
    float *read_, *d_divisors_;
};

// Adds the queries of a chunk, and with `write` also their gradients, to what a prefetcher requests; returns
// how often `compute` calls `issue`.
Int prefetch_queries(Prefetcher& prefetcher, const Linear& x, const LinearGradients& out, const Sequence& s,
                     HeadChunk i, bool write) {
    const Int token = s.first_query + i.token;
    const Tensor d_q = contiguous(out.d_q, x.queries, x.heads, input_width(x));
    for_heads(x, i.group, [&](Int h) {
        if (write) prefetch_rows(prefetcher, d_q, x.type, s.batch, token, h, i.n, input_width(x));
        prefetch_rows(prefetcher, x.q, x.type, s.batch, token, h, i.n, input_width(x));
        prefetch_rows(prefetcher, out.o, x.type, s.batch, token, h, i.n, x.values);
    });
    return x.heads / x.groups * ceil_div(i.n, TILE_ROWS) * (x.causal ? 2 : 1);
}

Status causal_query_task(const Linear& x, const LinearGradients& out, const LinearTask& task,
                         const States& states) {
    Workspace memory;
    KeyChunk chunk(x, true, true, memory);
    Corrections corrections(x, memory);
    QueryGradients queries(x, out, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Sequence& s = task.sequence;
    Prefetcher prefetcher;
    const auto prepare = [&](Prefetcher& next, HeadChunk i) {
        const Int calls = prefetch_queries(next, x, out, s, i, true);
        prefetch_rows(next, x.k, x.type, s.batch, s.first_key + i.token, i.group, i.n, input_width(x));
        prefetch_rows(next, x.v, x.type, s.batch, s.first_key + i.token, i.group, i.n, x.values);
        next.spread_over(calls + ceil_div(x.values, TILE_ROWS));
    };
    for_chunks(x, task, Order::FORWARDS, task.from(s.keys), task.to(s.keys), prefetcher, prepare,
               [&](HeadChunk i) {
                   const State state = states.of(s.index, task.segment, i.group);
                   save_state(x, out, s, i, state);
                   chunk.read(s, s.first_key + i.token, i.n, i.group);
                   if (x.rates) {
                       corrections.solve(s, chunk, i.group, state, Layout::TRANSPOSED, prefetcher);
                       for (Int j = 0; j < i.n; ++j)
                           write_row(FLOAT32, row(corrections.residuals, j), x.values,
                                     residual_row(x, out, s.batch, chunk.token + j, i.group));
                   }
                   for_heads(x, i.group, [&](Int head) {
                       queries.compute(s, chunk.token, i.n, head, state, &chunk, prefetcher);
                   });
                   chunk.update_transposed(state, prefetcher);
               });
    return SUCCESS;
}

Status bidirectional_query_task(const Linear& x, const LinearGradients& out, const LinearTask& task,
                                const States& states, Int segments) {
    Workspace memory;
    QueryGradients queries(x, out, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Sequence& s = task.sequence;
    Prefetcher prefetcher;
    const auto prepare = [&](Prefetcher& next, HeadChunk i) {
        next.spread_over(prefetch_queries(next, x, out, s, i, true));
    };
    for_chunks(x, task, Order::FORWARDS, task.from(s.queries), task.to(s.queries), prefetcher, prepare,
               [&](HeadChunk i) {
                   const State state = states.of(s.index, segments, i.group);
                   for_heads(x, i.group, [&](Int head) {
                       queries.compute(s, s.first_query + i.token, i.n, head, state, nullptr, prefetcher);
                   });
               });
    return SUCCESS;
}

// The queries of one chunk of one head, with G and dden, for phases 4, 7 and 8.
class QueryChunk {
  public:
    QueryChunk(const Linear& x, const LinearGradients& out, Workspace& memory)
        : g(memory.rows(chunk_length(x), round_up(x.values))),
          d_divisor(memory.floats(chunk_length(x))),
          x_(x),
          out_(out),
          rows_(x, Side::QUERIES, chunk_length(x), memory, true) {}

    void read(const Sequence& s, Int token, Int count, Int head) {
        n = count;
        q = rows_.read(s.batch, token, head, n);
        for (Int i = 0; i < n; ++i) {
            read_gradient(x_, out_, s.batch, token + i, head, g.data + i * g.row);
            d_divisor[i] =
                x_.normalize ? out_.d_divisor[(s.batch * x_.queries + token + i) * x_.heads + head] : 0;
        }
    }

    // 8. dS' = factor dS + (exp(b) Q)^T G, and dz' alike with dden. With gates it scales G in place.
    void accumulate(float factor, State gradient, const float* from_start, Prefetcher& prefetcher) const {
        for (Int i = 0; from_start && i < n; ++i) scale_row(row(g, i), x_.values, from_start[i]);
        multiply_onto(factor, gradient.kv, x_.features, x_.values, n, {q.data, 1, q.row}, g, gradient.kv,
                      prefetcher);
        if (!x_.normalize) return scale_row(gradient.k_sum, x_.features, factor);
        for (Int r = 0; r < x_.features; r += WIDTH) {
            Vec total{};
            for (Int i = 0; i < n; ++i)
                total +=
                    load(q.data + i * q.row + r) * broadcast(d_divisor[i] * (from_start ? from_start[i] : 1));
            store(gradient.k_sum + r, broadcast(factor) * load(gradient.k_sum + r) + total);
        }
    }

    Int n = 0;
    Rows q{}, g;
    float* d_divisor;

  private:
    const Linear& x_;
    const LinearGradients& out_;
    FeatureRows rows_;
};

// The states before the chunks of a span, for every head of a task. They are computed again from the one that
// is kept.
class SpanStates {
  public:
    SpanStates(const Linear& x, const LinearGradients& out, const LinearTask& task, Workspace& memory)
        : x_(x),
          out_(out),
          task_(task),
          size_(state_floats(x, Layout::PLAIN)),
          chunk_(x, false, true, memory),
          at_(memory.zeros(keeps_states(x, out) ? (task.last_head - task.first_head) * SPAN * size_ : 0)) {}

    // Computes the states of the span whose last chunk is `i`.
    void compute(HeadChunk i) {
        const Sequence& s = task_.sequence;
        const Int first = i.token - i.token % (SPAN * chunk_.longest);
        const State kept = saved_state(x_, out_, s, first, i.group), start = before(first, i.group);
        transpose(x_.values, x_.features, kept.kv.data, kept.kv.row, start.kv);
        std::memcpy(start.k_sum, kept.k_sum, (size_t)round_up(x_.features) * 4);
        for (Int token = first; token < i.token; token += chunk_.longest) {
            chunk_.read(s, s.first_key + token, chunk_.longest, i.group);
            for (Int j = 0; x_.rates && j < chunk_.n; ++j)
                read_correction(x_, out_, s.batch, chunk_.token + j, i.group, row(chunk_.values, j));
            chunk_.update(before(token, i.group), before(token + chunk_.longest, i.group), prefetcher_);
        }
    }

    State before(Int token, Int group) const {
        const Int place = (group - task_.first_head) * SPAN + token / chunk_.longest % SPAN;
        return state_at(x_, Layout::PLAIN, at_ + place * size_);
    }

  private:
    const Linear& x_;
    const LinearGradients& out_;
    const LinearTask& task_;
    const Int size_;
    KeyChunk chunk_;
    Prefetcher prefetcher_;  // requests nothing
    float* at_;
};

// Phases 5 to 9 for one chunk of one key head: dK, dV and the gradients of the gates and rates.
class KeyGradients {
  public:
    KeyGradients(const Linear& x, const LinearGradients& out, Workspace& memory)
        : chunk(x, false, x.rates, memory),
          x_(x),
          out_(out),
          corrections_(x, memory),
          queries_(x, out, memory),
          values_T_(memory.rows(round_up(x.values), chunk.longest)),
          d_k_T_{memory.zeros(round_up(x.features) * chunk.longest), chunk.longest},
          q_T_(memory.rows(round_up(x.features), chunk.longest)),
          g_T_(memory.rows(round_up(x.values), chunk.longest)),
          scores_(memory.rows(TILE_ROWS, chunk.longest)),
          d_scores_(memory.rows(TILE_ROWS, chunk.longest)),
          d_k_{memory.zeros(chunk.longest * round_up(x.features)), round_up(x.features)},
          d_v_(memory.rows(chunk.longest, round_up(x.values))),
          decay_(memory.floats(chunk.longest)),
          pairs_(memory.floats(chunk.longest)),
          d_gates_((double*)memory.floats(2 * chunk.longest)) {
        if (!x.rates) return;
        state_T_ = {memory.zeros(round_up(x.values) * round_up(x.features)), round_up(x.features)};
        d_read_ = memory.rows(chunk.longest, chunk.longest);
        d_read_keys_ = memory.rows(chunk.longest, round_up(x.features));
        d_rates_ = memory.floats(chunk.longest);
    }

    // `gradient` is that of the state after the chunk, and is replaced by that of the state before it. That
    // state itself is needed for gates and rates only.
    void compute(const Sequence& s, HeadChunk i, State before, State gradient, Prefetcher& prefetcher) {
        const Int n = i.n, group = i.group;
        chunk.read(s, s.first_key + i.token, n, group);
        if (x_.rates) read_corrections(s, group, prefetcher);
        if (x_.log_decay) std::memset(d_gates_, 0, (size_t)n * 8);
        compute_through_state(gradient, prefetcher);
        if (gate_gradients(x_, out_)) add_gate_gradients(before, gradient);
        float decay = chunk.gates.chunk_decay;
        if (x_.causal)
            for_heads(x_, group, [&](Int h) {
                queries_.read(s, chunk.token, n, h);
                accumulate_queries();
                if (gate_gradients(x_, out_)) add_query_gate_gradients(s, h);
                queries_.accumulate(decay, gradient, chunk.gates.from_start, prefetcher);
                decay = 1;
            });
        else if (x_.log_decay) scale_row(gradient.kv.data, state_floats(x_, Layout::PLAIN), decay);
        if (x_.rates) pass_corrections(before, gradient, prefetcher);
        write(s, group);
    }

    KeyChunk chunk;

  private:
    // 5. dK = to_end (V dS^T + dz) and dV = to_end K dS. V dS^T is computed as the transpose of dS V^T,
    // because it is smaller than dS, which would have to be transposed otherwise.
    void compute_through_state(State gradient, Prefetcher& prefetcher) {
        const float* to_end = chunk.gates.to_end;
        transpose(chunk.n, x_.values, chunk.values.data, chunk.values.row, values_T_);
        multiply(x_.features, chunk.n, x_.values, {gradient.kv.data, gradient.kv.row, 1}, values_T_, d_k_T_,
                 prefetcher);
        // All lanes, so that those behind the features are 0 again: they may hold NaN of another head.
        transpose(round_up(x_.features), chunk.n, d_k_T_.data, d_k_T_.row, d_k_);
        multiply(chunk.n, x_.values, x_.features, {chunk.keys.data, chunk.keys.row, 1}, gradient.kv, d_v_,
                 prefetcher);
        for (Int j = 0; j < chunk.n; ++j) {
            float *d_k = d_k_.data + j * d_k_.row, *d_v = d_v_.data + j * d_v_.row;
            for (Int r = 0; r < x_.features; r += WIDTH)
                store(d_k + r, load(d_k + r) + load(gradient.k_sum + r));
            if (!to_end) continue;
            scale_row(d_k, x_.features, to_end[j]);
            scale_row(d_v, x_.values, to_end[j]);
        }
    }

    // 6. Gate t scales the state before the chunk and what the keys before t have added to it.
    void add_gate_gradients(State state, State gradient) {
        double before = dot(state.k_sum, gradient.k_sum, x_.features);
        for (Int r = 0; r < x_.features; ++r) before += dot(row(state.kv, r), row(gradient.kv, r), x_.values);
        before *= chunk.gates.chunk_decay;
        for (Int j = 0; j < chunk.n; ++j) {
            d_gates_[j] += before;
            before += dot(chunk.keys.data + j * chunk.keys.row, d_k_.data + j * d_k_.row, x_.features);
        }
    }

    // 7. Queries i >= t read the state before the chunk decayed by gate t.
    void add_query_gate_gradients(const Sequence& s, Int head) {
        double read = 0;
        for (Int i = chunk.n - 1; i >= 0; --i) {
            read += out_.d_log_from_start[(s.batch * x_.queries + chunk.token + i) * x_.heads + head];
            d_gates_[i] += read;
        }
    }

    // 7. dK += dP^T Q and dV += P^T G, over the queries from each key on.
    void accumulate_queries() {
        const Int n = chunk.n;
        const Rows q = queries_.q, g = queries_.g;
        transpose(n, x_.features, q.data, q.row, q_T_);
        transpose(n, x_.values, g.data, g.row, g_T_);
        for (Int j = 0; j < n; j += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, n - j), from = j / WIDTH * WIDTH;
            const float *key = chunk.keys.data + j * chunk.keys.row,
                        *value = chunk.values.data + j * chunk.values.row;
            multiply_few_rows(rows, n - from, x_.features, {key, chunk.keys.row, 1},
                              {q_T_.data + from, q_T_.row}, {scores_.data + from, scores_.row}, false);
            multiply_few_rows(rows, n - from, x_.values, {value, chunk.values.row, 1},
                              {g_T_.data + from, g_T_.row}, {d_scores_.data + from, d_scores_.row}, false);
            for (Int a = 0; a < rows; ++a)
                mask(j + a, from, scores_.data + a * scores_.row, d_scores_.data + a * d_scores_.row);
            multiply_few_rows(rows, x_.features, n - j, {d_scores_.data + j, d_scores_.row, 1},
                              {q.data + j * q.row, q.row}, {d_k_.data + j * d_k_.row, d_k_.row}, true);
            multiply_few_rows(rows, x_.values, n - j, {scores_.data + j, scores_.row, 1},
                              {g.data + j * g.row, g.row}, {d_v_.data + j * d_v_.row, d_v_.row}, true);
        }
    }

    // Row j of P^T and dP^T; each pair of key j and a query contributes P dP to the gradients of gates.
    void mask(Int j, Int from, float* scores, float* d_scores) {
        const bool gated = chunk.gates.from_start;
        if (gated) chunk.gates.column(j, chunk.n, decay_);
        for (Int i = from; i < chunk.n; i += WIDTH) {
            Vec p = load(scores + i), d_p = load(d_scores + i) + load(queries_.d_divisor + i);
            if (gated) {
                d_p *= load(decay_ + i);
                store(pairs_ + i, p * d_p);
                p *= load(decay_ + i);
            }
            store(scores + i, keep(j, chunk.n, i, p));
            store(d_scores + i, keep(j, chunk.n, i, d_p));
        }
        if (gate_gradients(x_, out_)) add_pairs(j);
    }

    // Key j and a later token i contribute their pair to the gradients of the gates j < t <= i.
    void add_pairs(Int j) {
        double pairs = 0;
        for (Int i = chunk.n - 1; i > j; --i) {
            pairs += pairs_[i];
            d_gates_[i] += pairs;
        }
    }

    // N takes the place of V.
    void read_corrections(const Sequence& s, Int group, Prefetcher& prefetcher) {
        for (Int j = 0; j < chunk.n; ++j)
            read_row(FLOAT32, residual_row(x_, out_, s.batch, chunk.token + j, group), x_.values,
                     row(corrections_.residuals, j));
        corrections_.restore(s, chunk, group, prefetcher);
    }

    // 9. Key i reads exp(b_i) S^T k_i + sum_{j < i} D_ij (k_i . k_j) n_j.
    void pass_corrections(State state, State gradient, Prefetcher& prefetcher) {
        const Int n = chunk.n, R = x_.features, M = x_.values;
        const Rows keys = chunk.keys, g = queries_.g;
        const float* from_start = chunk.gates.from_start;
        corrections_.solve_back(chunk, d_v_, d_rates_);
        for (Int a = 0; a < n; ++a)  // G = -dV
            for (Int m = 0; m < M; m += WIDTH) store(row(g, a) + m, -load(row(d_v_, a) + m));
        // Inside the chunk, as the queries in phase 7.
        transpose(n, M, g.data, g.row, g_T_);
        for (Int j = 0; j < n; j += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, n - j), from = j / WIDTH * WIDTH;
            const Rows d_scores = {row(d_read_, j), d_read_.row};
            multiply_few_rows(rows, n - from, M, {row(chunk.values, j), chunk.values.row, 1},
                              {g_T_.data + from, g_T_.row}, {d_scores.data + from, d_scores.row}, false);
            for (Int a = 0; a < rows; ++a)
                mask_reads(j + a, from, row(corrections_.scores_T, j + a), row(d_scores, a));
            multiply_few_rows(rows, R, n - j, {d_scores.data + j, d_scores.row, 1}, {row(keys, j), keys.row},
                              {row(d_k_, j), d_k_.row}, true);
        }
        for (Int a = 0; a < n; a += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, n - a);
            multiply_few_rows(rows, R, a + rows, {d_read_.data + a, 1, d_read_.row}, keys,
                              {row(d_k_, a), d_k_.row}, true);
        }
        // From the state: dK += exp(b) G S^T, and dS += (exp(b) K)^T G.
        for (Int a = 0; from_start && a < n; ++a) scale_row(row(g, a), M, from_start[a]);
        transpose(R, M, state.kv.data, state.kv.row, state_T_);
        multiply(n, R, M, {g.data, g.row, 1}, state_T_, d_read_keys_, prefetcher);
        double read = 0;
        for (Int a = n - 1; a >= 0; --a) {
            float *d_key = row(d_k_, a), *d_read = row(d_read_keys_, a);
            if (from_start) d_gates_[a] += read += dot(row(keys, a), d_read, R);
            for (Int r = 0; r < R; r += WIDTH) store(d_key + r, load(d_key + r) + load(d_read + r));
        }
        multiply_onto(1, gradient.kv, R, M, n, {keys.data, 1, keys.row}, g, gradient.kv, prefetcher);
    }

    // Row j of the gradients of what later keys read from key j.
    void mask_reads(Int j, Int from, const float* scores, float* d_scores) {
        const bool gated = chunk.gates.from_start;
        if (gated) chunk.gates.column(j, chunk.n, decay_);
        for (Int i = from; i < chunk.n; i += WIDTH) {
            Vec d_score = load(d_scores + i);
            if (gated) {
                store(pairs_ + i, load(scores + i) * d_score);
                d_score *= load(decay_ + i);
            }
            store(d_scores + i, keep(j + 1, chunk.n, i, d_score));
        }
        if (gate_gradients(x_, out_)) add_pairs(j);
    }

    void write(const Sequence& s, Int group) const {
        const Int first = (s.batch * x_.keys + chunk.token) * x_.groups + group;
        chunk.write_key_gradients(d_k_, [&](Int j) {
            return (char*)out_.d_k + (first + j * x_.groups) * input_width(x_) * size_of(x_.type);
        });
        for (Int j = 0; j < chunk.n; ++j) {
            const Int row = first + j * x_.groups;
            write_row(x_.type, d_v_.data + j * d_v_.row, x_.values,
                      (char*)out_.d_v + row * x_.values * size_of(x_.type));
            if (x_.rates) out_.d_rates[row] = d_rates_[j];
            if (gate_gradients(x_, out_))
                out_.d_log_decay[row] = x_.log_decay[row] < LOWEST_GATE ? 0 : d_gates_[j];
        }
    }

    const Linear& x_;
    const LinearGradients& out_;
    Corrections corrections_;
    QueryChunk queries_;
    Rows values_T_, d_k_T_, q_T_, g_T_, scores_, d_scores_, d_k_, d_v_;
    Rows state_T_{}, d_read_{}, d_read_keys_{};  // phase 9: S^T, gradients of reads, and of keys through S
    float *decay_, *pairs_;
    double* d_gates_;
    float* d_rates_ = nullptr;
};

// 4. Accumulates the gradient of the state that a segment's queries read: the one before the segment if
// causal, otherwise the final state.
Status accumulate_query_segment(const Linear& x, const LinearGradients& out, const LinearTask& task,
                                const States& gradients) {
    Workspace memory;
    QueryChunk queries(x, out, memory);
    Gates gates(x, chunk_length(x), memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Sequence& s = task.sequence;
    Prefetcher prefetcher;
    const auto prepare = [&](Prefetcher& next, HeadChunk i) {
        prefetch_queries(next, x, out, s, i, false);
        next.spread_over(x.heads / x.groups * ceil_div(x.features, TILE_ROWS));
    };
    for_chunks(x, task, Order::BACKWARDS, task.from(s.queries), task.to(s.queries), prefetcher, prepare,
               [&](HeadChunk i) {
                   const State gradient = gradients.of(s.index, task.segment, i.group);
                   const bool gated = x.causal && x.log_decay;
                   if (gated) gates.read(s.batch, s.first_key + i.token, i.n, i.group);
                   float decay = gated ? gates.chunk_decay : 1;
                   for_heads(x, i.group, [&](Int h) {
                       queries.read(s, s.first_query + i.token, i.n, h);
                       queries.accumulate(decay, gradient, gated ? gates.from_start : nullptr, prefetcher);
                       decay = 1;
                   });
               });
    return SUCCESS;
}

// 4. Computes the gradients of all states but the one before the first segment.
Status compute_state_gradients(const Linear& x, const LinearGradients& out, const Plan& plan,
                               const States& gradients) {
    const Status status = parallel_for(plan.tasks(x), plan.threads, [&](Int i) {
        const FlushSubnormals flush(x.log_decay);
        const LinearTask task(x, plan, i);
        const Int n = task.sequence.index;
        for (Int g = task.first_head; g < task.last_head; ++g) {
            gradients.read(n, task.segment, g, nullptr, nullptr);
            if (task.last) gradients.read(n, plan.segments, g, out.kv, out.k_sum);
        }
        return !x.causal || !task.first ? accumulate_query_segment(x, out, task, gradients) : SUCCESS;
    });
    if (status != SUCCESS) return status;
    for (Int i = plan.tasks(x) - 1; i >= 0; --i) {
        const LinearTask task(x, plan, i);
        const Int n = task.sequence.index;
        for (Int g = task.first_head; g < task.last_head; ++g)
            if (!x.causal)
                gradients.add(gradients.of(n, plan.segments, g), 1, gradients.of(n, task.segment, g));
            else if (!task.first)
                gradients.add(gradients.of(n, task.segment, g), segment_decay(x, task, g),
                              gradients.of(n, task.segment + 1, g));
    }
    if (x.causal) return SUCCESS;
    // Keys of all segments reach the outputs through the final state only. With gates there is one segment.
    for (Int i = 0; i < plan.tasks(x); ++i) {
        const LinearTask task(x, plan, i);
        for (Int g = task.first_head; g < task.last_head && !task.last; ++g)
            std::memcpy(gradients.of(task.sequence.index, task.segment + 1, g).kv.data,
                        gradients.of(task.sequence.index, plan.segments, g).kv.data,
                        (size_t)state_floats(x, Layout::PLAIN) * 4);
    }
    return SUCCESS;
}

Status key_task(const Linear& x, const LinearGradients& out, const LinearTask& task,
                const States& gradients) {
    Workspace memory;
    KeyGradients keys(x, out, memory);
    const bool recomputes = keeps_states(x, out);
    SpanStates states(x, out, task, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Sequence& s = task.sequence;
    Prefetcher prefetcher;
    const auto prepare = [&](Prefetcher& next, HeadChunk i) {
        const Int token = s.first_key + i.token;
        prefetch_rows(next, contiguous(out.d_v, x.keys, x.groups, x.values), x.type, s.batch, token, i.group,
                      i.n, x.values);
        prefetch_rows(next, contiguous(out.d_k, x.keys, x.groups, input_width(x)), x.type, s.batch, token,
                      i.group, i.n, input_width(x));
        if (x.causal) prefetch_queries(next, x, out, s, i, false);
        prefetch_rows(next, x.v, x.type, s.batch, token, i.group, i.n, x.values);
        prefetch_rows(next, x.k, x.type, s.batch, token, i.group, i.n, input_width(x));
        next.spread_over(ceil_div(i.n, TILE_ROWS) +
                         ceil_div(x.features, TILE_ROWS) * (x.causal ? 1 + x.heads / x.groups : 1));
    };
    for_chunks(x, task, Order::BACKWARDS, task.from(s.keys), task.to(s.keys), prefetcher, prepare,
               [&](HeadChunk i) {
                   const Int end = i.token + i.n;
                   if (recomputes && (end == task.to(s.keys) || end % (SPAN * chunk_length(x)) == 0))
                       states.compute(i);
                   const State before = recomputes ? states.before(i.token, i.group) : State{};
                   keys.compute(s, i, before, gradients.of(s.index, task.segment + 1, i.group), prefetcher);
               });
    // 10. Gradient of the initial state.
    if (task.first)
        for (Int g = task.first_head; g < task.last_head; ++g)
            write_state(x, gradients.of(s.index, 1, g), s.index * x.groups + g, out.d_kv, out.d_k_sum);
    return SUCCESS;
}

Status run(const Linear& x, const LinearGradients& out) {
    advise_huge_pages(x, out.d_q, x.queries, x.heads, input_width(x));
    advise_huge_pages(x, out.d_k, x.keys, x.groups, input_width(x));
    advise_huge_pages(x, out.d_v, x.keys, x.groups, x.values);
    Workspace memory;
    // 1. States before the segments.
    const Plan plan(x, !x.rates && (x.causal || !x.log_decay), keeps_states(x, out) ? SPAN : 1);
    const States states(x, plan, Layout::TRANSPOSED, memory), gradients(x, plan, Layout::PLAIN, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    Status status =
        compute_states(x, plan, states, !x.causal, [&](const Sequence& s, HeadChunk i, State state) {
            if (!x.causal) save_state(x, out, s, i, state);
        });
    if (status != SUCCESS) return status;
    // 2 and 3. Queries.
    status = parallel_for(plan.tasks(x), plan.threads, [&](Int i) {
        const FlushSubnormals flush(x.log_decay);
        const LinearTask task(x, plan, i);
        return x.causal ? causal_query_task(x, out, task, states)
                        : bidirectional_query_task(x, out, task, states, plan.segments);
    });
    if (status != SUCCESS) return status;
    // 4. Gradients of the states.
    status = compute_state_gradients(x, out, plan, gradients);
    if (status != SUCCESS) return status;
    // 5 to 10. Keys, values, gates and rates.
    return parallel_for(plan.tasks(x), plan.threads, [&](Int i) {
        const FlushSubnormals flush(x.log_decay);
        return key_task(x, out, LinearTask(x, plan, i), gradients);
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(linear_backward)(const Linear* x, const LinearGradients* out) {
    return UNROLLED_ISA::run(*x, *out);
}

int64_t EXPORTED(linear_saved_floats)(const Linear* x) { return UNROLLED_ISA::saved_floats(*x); }
