// Linear attention, forward: scores, masked product, state read, normaliser and state update in one pass.
#include "kernels.h"
#include "linear_plan.h"

namespace UNROLLED_ISA {
namespace {

// Some query rows of one head: few enough that all their products stay in registers.
class QueryRows {
  public:
    QueryRows(const Linear& x, const LinearOutputs& out, Workspace& memory)
        : x_(x),
          out_(out),
          rows_(x.type, x.features, TILE_ROWS, memory),
          scores_(memory.rows(TILE_ROWS, chunk_length(x))),
          o_(memory.rows(TILE_ROWS, round_up(x.values))) {}

    // The queries [i, i + n) of a chunk whose first is `token`, reading `state` and the keys of `chunk` up to
    // themselves, or `state` alone.
    void attend(const Sequence& s, Int token, Int i, Int n, Int head, State state, const KeyChunk* chunk,
                Rows keys_T, Ahead& ahead) {
        const Rows q = rows_.read(x_.q, s.batch, token + i, head, n);
        const Int keys = chunk ? i + n : 0;
        const float* from_start = chunk && chunk->gates.from_start ? chunk->gates.from_start + i : nullptr;
        ahead.ask(x_.features);
        if (chunk) {
            multiply_few_rows(n, keys, x_.features, {q.at, q.row, 1}, keys_T, scores_, false);
            for (Int a = 0; a < n; ++a) chunk->gates.weigh(scores_.at + a * scores_.row, i + a, keys);
        }
        float factors[TILE_ROWS];
        const Int row = (s.batch * x_.queries + token + i) * x_.heads + head;
        if (x_.normalize)
            for (Int a = 0; a < n; ++a) {
                const float d = divisor(q.at + a * q.row, scores_.at + a * scores_.row, keys, state,
                                        from_start ? from_start[a] : 1);
                out_.divisor[row + a * x_.heads] = d;
                factors[a] = divisible(d) ? 1 / d : 0;
            }
        const bool direct = usable(x_.type, x_.values);
        const Rows o = direct ? Rows{(float*)out_.o + row * x_.values, x_.heads * x_.values} : o_;
        ahead.ask(x_.features);
        for (Int m = 0; m < x_.values; m += TILE_VECS * WIDTH)
            with_tile(n, x_.values - m, [&](auto tile) {
                tile.add_product({q.at, q.row, 1}, state.kv.at + m, state.kv.row, x_.features);
                if (from_start) tile.scale_rows(from_start);
                if (chunk)
                    tile.add_product({scores_.at, scores_.row, 1}, chunk->values.at + m, chunk->values.row,
                                     keys);
                if (x_.normalize) tile.scale_rows(factors);
                tile.write(o.at + m, o.row);
            });
        for (Int a = 0; a < n && x_.normalize; ++a)
            if (!divisible(out_.divisor[row + a * x_.heads]))
                std::memset(o.at + a * o.row, 0, (size_t)x_.values * 4);
        if (direct) return;
        for (Int a = 0; a < n; ++a)
            write_row(x_.type, o.at + a * o.row, x_.values,
                      (char*)out_.o + (row + a * x_.heads) * x_.values * size_of(x_.type));
    }

  private:
    // P 1 + exp(b) q . z
    float divisor(const float* q, const float* scores, Int keys, State state, float from_start) const {
        Vec read{}, total{};
        for (Int r = 0; r < x_.features; r += WIDTH) read += load(q + r) * load(state.k_sum + r);
        for (Int j = 0; j < keys; j += WIDTH) total += load(scores + j);
        return sum(total + read * broadcast(from_start));
    }

    const Linear& x_;
    const LinearOutputs& out_;
    HeadRows rows_;
    Rows scores_, o_;
};

// The queries and outputs of an item, and how much `attend` will ask for them.
Int add_queries(Ahead& ahead, const Linear& x, const LinearOutputs& out, const Sequence& s, Item i) {
    const Int per_group = x.heads / x.groups, token = s.first_query + i.token;
    for (Int h = i.group * per_group; h < (i.group + 1) * per_group; ++h) {
        add_rows(ahead, contiguous(out.o, x.queries, x.heads, x.values), x.type, s.batch, token, h, i.n,
                 x.values);
        add_rows(ahead, x.q, x.type, s.batch, token, h, i.n, x.features);
    }
    return per_group * ceil_div(i.n, TILE_ROWS) * 2 * x.features;
}

void causal_task(const Linear& x, const LinearOutputs& out, const Task& task, const States& states) {
    Workspace memory;
    KeyChunk chunk(x, false, true, memory);
    QueryRows queries(x, out, memory);
    const Rows keys_T = memory.rows(round_up(x.features), chunk.longest);
    const Sequence& s = task.sequence;
    Ahead ahead;
    const auto prepare = [&](Ahead& next, Item i) {
        const Int work = add_queries(next, x, out, s, i);
        add_rows(next, x.v, x.type, s.batch, s.first_key + i.token, i.group, i.n, x.values);
        add_rows(next, x.k, x.type, s.batch, s.first_key + i.token, i.group, i.n, x.features);
        next.over(work + ceil_div(x.features, TILE_ROWS) * i.n);
    };
    for_chunks(x, task, Order::FORWARDS, task.from(s.keys), task.to(s.keys), ahead, prepare, [&](Item i) {
        const State state = states.of(s.index, task.segment, i.group);
        chunk.read(s, s.first_key + i.token, i.n, i.group);
        transpose(i.n, x.features, chunk.keys.at, chunk.keys.row, keys_T);
        for_rows(x, i.group, i.n, [&](Int head, Int row, Int n) {
            queries.attend(s, chunk.token, row, n, head, state, &chunk, keys_T, ahead);
        });
        chunk.enter(state, keys_T, ahead);
    });
}

void bidirectional_task(const Linear& x, const LinearOutputs& out, const Task& task, const States& states,
                        Int segments) {
    Workspace memory;
    QueryRows queries(x, out, memory);
    const Sequence& s = task.sequence;
    Ahead ahead;
    const auto prepare = [&](Ahead& next, Item i) { next.over(add_queries(next, x, out, s, i)); };
    for_chunks(x, task, Order::FORWARDS, task.from(s.queries), task.to(s.queries), ahead, prepare,
               [&](Item i) {
                   const State state = states.of(s.index, segments, i.group);
                   for_rows(x, i.group, i.n, [&](Int head, Int row, Int n) {
                       queries.attend(s, s.first_query + i.token, row, n, head, state, nullptr, {}, ahead);
                   });
               });
}

void run(const Linear& x, const LinearOutputs& out) {
    Workspace memory;
    const Plan plan(x, true);
    const States states(x, plan, Layout::PLAIN, memory);
    find_states(x, plan, states, !x.causal, [](const Sequence&, Item, State) {});
    parallel_for(plan.tasks(x), plan.threads, [&](Int i) {
        const Task task(x, plan, i);
        if (x.causal) causal_task(x, out, task, states);
        else bidirectional_task(x, out, task, states, plan.segments);
        // The last causal task has let all keys enter its state.
        if (task.last)
            for (Int g = task.first_head; g < task.last_head; ++g)
                write_state(x, states.of(task.sequence.index, x.causal ? task.segment : plan.segments, g),
                            task.sequence.index * x.groups + g, out.kv, out.k_sum);
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

void EXPORTED(linear_forward)(const Linear* x, const LinearOutputs* out) { UNROLLED_ISA::run(*x, *out); }
