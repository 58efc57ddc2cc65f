// How linear attention is divided into tasks, and the states that pass between them.
//
// 1. A plan: heads are divided among tasks first, sequences into segments only if there are fewer tasks
//    than threads.
// 2. The states before every segment. Each task sums what the keys of its segment add to a state of 0,
//    then the sums are accumulated along the sequence. Without segments there is only the initial
//    state to read.
// 3. A loop over the chunks of a task, which prefetches the rows of the next chunk.
#pragma once

#include "linear_chunk.h"

namespace UNROLLED_ISA {

// 1. The heads of a token are adjacent in memory, so a task walks along a sequence with several heads at
// once: as many as have their states in the second-level cache, 2^17 floats or 512 KiB. A segment has four
// chunks or more, and begins at a multiple of `unit` chunks.
struct Plan {
    Int heads_per_task, head_blocks, segments, threads, unit;

    Plan(const Linear& x, bool may_segment, Int unit) : unit(unit) {
        const Int length = max(x.queries, x.keys), state = max(1, x.features * x.values);
        threads = threads_for((double)x.sequences * (double)length * (double)(x.heads * state), x.threads);
        heads_per_task = min(max(1, x.groups), max(1, (1 << 17) / state));
        const Int whole = whole_sequences(x);
        while (heads_per_task > 1 && whole * ceil_div(x.groups, heads_per_task) < threads)
            heads_per_task = ceil_div(heads_per_task, 2);
        head_blocks = ceil_div(x.groups, heads_per_task);
        // A segment costs a state for every sequence, so a pack of many is not divided for a long one.
        const Int divided = x.sequences > 4 * threads ? x.sequences : whole;
        const Int enough = ceil_div(threads, max(1, divided * head_blocks));
        segments = may_segment ? min(enough, max(1, length / chunk_length(x) / max(4, unit))) : 1;
    }

    Int tasks(const Linear& x) const { return x.sequences * head_blocks * segments; }
};

// Task `index` of a plan.
struct LinearTask : Task {
    Int segment;

    LinearTask(const Linear& x, const Plan& plan, Int index)
        : segment(index % plan.segments), segments_(plan.segments), unit_(plan.unit * chunk_length(x)) {
        sequence = sequence_at(x, index / plan.segments / plan.head_blocks);
        first_head = index / plan.segments % plan.head_blocks * plan.heads_per_task;
        last_head = min(x.groups, first_head + plan.heads_per_task);
        first = segment == 0;
        last = segment == plan.segments - 1;
    }

    // The tokens [from, to) of this segment, of `length` in the sequence.
    Int from(Int length) const { return cut(segment, length); }
    Int to(Int length) const { return cut(segment + 1, length); }

  private:
    Int cut(Int i, Int length) const { return min(length, ceil_div(length, unit_) * i / segments_ * unit_); }

    Int segments_, unit_;
};

// 2. For every key head, the state before each segment of every sequence and the state after the last one.
class States {
  public:
    States(const Linear& x, const Plan& plan, Layout layout, Workspace& memory)
        : layout(layout),
          x_(x),
          slots_(plan.segments + 1),
          size_(state_floats(x, layout)),
          at_(memory.floats(x.sequences * slots_ * x.groups * size_)) {}

    State of(Int sequence, Int segment, Int head) const {
        return state_at(x_, layout, at_ + ((sequence * slots_ + segment) * x_.groups + head) * size_);
    }
    void read(Int sequence, Int segment, Int head, const float* kv, const float* k_sum) const {
        read_state(x_, layout, kv, k_sum, sequence * x_.groups + head, of(sequence, segment, head));
    }
    // to += factor * from
    void add(State to, float factor, State from) const {
        for (Int i = 0; i < size_; i += WIDTH)
            store(to.kv.data + i, load(to.kv.data + i) + load(from.kv.data + i) * broadcast(factor));
    }

    const Layout layout;

  private:
    const Linear& x_;
    Int slots_, size_;
    float* at_;
};

// The product of the gates of a segment, by which a state decays that passes through it.
inline float segment_decay(const Linear& x, const LinearTask& task, Int head) {
    double total = 0;
    const Sequence& s = task.sequence;
    if (x.log_decay)
        for (Int t = task.from(s.keys); t < task.to(s.keys); ++t)
            total += log_gate(x, s.batch, s.first_key + t, head);
    return (float)__builtin_exp(total);
}

enum class Order { FORWARDS, BACKWARDS };

// 3. One chunk of the tokens of a task, for one of its key heads.
struct HeadChunk {
    Int token, n, group;  // tokens count from the start of the sequence
};

// Calls `f(c)` for every chunk of the tokens [from, to) and each head of a task. Before each call,
// `prepare(prefetcher, next)` adds the rows of the next chunk and head, which `f` requests part by part.
template <typename P, typename F>
inline void for_chunks(const Linear& x, const LinearTask& task, Order order, Int from, Int to,
                       Prefetcher& prefetcher, P&& prepare, F&& f) {
    const Int longest = chunk_length(x), heads = task.last_head - task.first_head;
    const Int head_chunks = ceil_div(to - from, longest) * heads;
    const auto head_chunk = [&](Int i) {
        const Int t = from + (order == Order::FORWARDS ? i / heads : (head_chunks - 1 - i) / heads) * longest;
        return HeadChunk{t, min(longest, to - t), task.first_head + i % heads};
    };
    for (Int i = 0; i < head_chunks; ++i) {
        prefetcher.clear();
        if (i + 1 < head_chunks) prepare(prefetcher, head_chunk(i + 1));
        f(head_chunk(i));
    }
}

// Adds the keys of a task's segment to the state after it. `before_update(sequence, c, state)` sees the state
// before each chunk.
template <typename F>
inline Status accumulate_segment(const Linear& x, const LinearTask& task, const States& states,
                                 F&& before_update) {
    Workspace memory;
    const bool transposed = states.layout == Layout::TRANSPOSED;
    KeyChunk chunk(x, transposed, true, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Sequence& s = task.sequence;
    Prefetcher prefetcher;
    const auto prepare = [&](Prefetcher& next, HeadChunk i) {
        prefetch_rows(next, x.k, x.type, s.batch, s.first_key + i.token, i.group, i.n, input_width(x));
        prefetch_rows(next, x.v, x.type, s.batch, s.first_key + i.token, i.group, i.n, x.values);
        next.spread_over(ceil_div(transposed ? x.values : x.features, TILE_ROWS));
    };
    for_chunks(x, task, Order::FORWARDS, task.from(s.keys), task.to(s.keys), prefetcher, prepare,
               [&](HeadChunk i) {
                   const State state = states.of(s.index, task.segment + 1, i.group);
                   before_update(s, i, state);
                   chunk.read(s, s.first_key + i.token, i.n, i.group);
                   if (transposed) chunk.update_transposed(state, prefetcher);
                   else chunk.update(state, state, prefetcher);
               });
    return SUCCESS;
}

// Computes all states; the one after the last segment only if `with_last`.
template <typename F>
inline Status compute_states(const Linear& x, const Plan& plan, const States& states, bool with_last,
                             F&& before_update) {
    const Status status = parallel_for(plan.tasks(x), plan.threads, [&](Int i) {
        const FlushSubnormals flush(x.log_decay);
        const LinearTask task(x, plan, i);
        const Int n = task.sequence.index;
        const bool needed = with_last || !task.last;
        for (Int g = task.first_head; g < task.last_head; ++g) {
            if (task.first) states.read(n, 0, g, x.kv, x.k_sum);
            if (needed)
                states.read(n, task.segment + 1, g, task.first ? x.kv : nullptr,
                            task.first ? x.k_sum : nullptr);
        }
        return needed ? accumulate_segment(x, task, states, before_update) : SUCCESS;
    });
    if (status != SUCCESS) return status;
    for (Int i = 0; i < plan.tasks(x); ++i) {
        const LinearTask task(x, plan, i);
        if (task.first || (task.last && !with_last)) continue;
        for (Int g = task.first_head; g < task.last_head; ++g)
            states.add(states.of(task.sequence.index, task.segment + 1, g), segment_decay(x, task, g),
                       states.of(task.sequence.index, task.segment, g));
    }
    return SUCCESS;
}

}  // namespace UNROLLED_ISA
