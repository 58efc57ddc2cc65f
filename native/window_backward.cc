// Sliding-window attention, backward, in one pass over the queries. Each score is computed once and
// contributes to dQ, dK and dV. But if a block has more than MAX_KEYS keys, its scores are computed twice,
// since delta must be complete before dS.
//
// For each block of queries of a task:
// 1. Slide the buffer of keys and values to those that the block reads, and write the gradients of the keys
//    that leave it, which are complete.
// For each query head:
// 2. Read Q, dO, lse, and delta = -dlse.
// For each group of keys:
// 3. Scores s = K Q^T and dP = V dO^T, a row for each key.
// 4. P = exp(s - lse), and delta += sum of P dP.
// 5. Softmax backward: dS = P (dP - delta).
// 6. dV += P^T dO, dK += dS^T Q, dQ += dS K.
// And for the query head:
// 7. Scale and write dQ.
// After all tasks:
// 8. Add the gradients of keys that several tasks read, in the order of the tasks, so that every run gives
//    the same bits.
#include "kernels.h"
#include "window.h"

namespace UNROLLED_ISA {
namespace {

using namespace window;

// The floats of one key in `WindowTask::partial`: its gradients before phase 8.
Int partial_floats(const Window& x) { return round_up(x.features) + round_up(x.values); }

float* partial(const Window& x, const WindowTask& task, Int position) {
    return task.partial + (position - task.keys.first) * partial_floats(x);
}

// The address of the gradient of a key or of a value.
char* d_key(const Window& x, void* at, Int width, const WindowTask& task, Int position) {
    const Sequence& s = task.sequence;
    const Int row = (s.batch * x.keys + s.first_key + position) * x.groups + task.first_head;
    return (char*)at + row * width * size_of(x.type);
}

void write_gradients(const Window& x, const WindowGradients& out, const WindowTask& task, Int position,
                     const float* d_k, const float* d_v) {
    write_row(x.type, d_k, x.features, d_key(x, out.d_k, x.features, task, position));
    write_row(x.type, d_v, x.values, d_key(x, out.d_v, x.values, task, position));
}

// Whether queries of a neighbouring task read this key too.
bool shared(const WindowTask& task, Int position) {
    return (!task.first && position < (&task)[-1].keys.end) ||
           (!task.last && position >= (&task)[1].keys.first);
}

class Backward {
  public:
    Backward(const Window& x, const WindowGradients& out, const WindowTask& task, Workspace& memory)
        : x_(x),
          out_(out),
          task_(task),
          keys_(x, task, memory, true),
          block_(x, task, keys_),
          q_(x.features, memory),
          g_(x.values, memory),
          scores_(memory.rows(block_.max_keys(), BLOCK)),
          d_scores_(memory.rows(block_.max_keys(), BLOCK)),
          d_q_(memory.rows(BLOCK, round_up(x.features))),
          lse_(memory.floats(BLOCK)),
          delta_(memory.floats(BLOCK)) {}

    void run() {
        const Int per_group = x_.heads / x_.groups;
        for (Int t = task_.queries.first; t < task_.queries.end; t += BLOCK) {
            block_.begin({t, min(task_.queries.end, t + BLOCK)});
            // 1. Keys and values.
            move_to(keys_of(x_, task_.sequence, block_.queries));
            for (Int h = task_.first_head * per_group; h < (task_.first_head + 1) * per_group; ++h)
                differentiate(h);
        }
        move_to({task_.keys.end, task_.keys.end});
    }

  private:
    void move_to(Span keys) {
        keys_.move_to(keys, [&](Int row) {
            const Int position = keys_.position(row);
            if (!shared(task_, position))
                return write_gradients(x_, out_, task_, position, keys_.d_k(row).data, keys_.d_v(row).data);
            float* to = partial(x_, task_, position);
            std::memcpy(to, keys_.d_k(row).data, (size_t)round_up(x_.features) * 4);
            std::memcpy(to + round_up(x_.features), keys_.d_v(row).data, (size_t)round_up(x_.values) * 4);
        });
    }

    void differentiate(Int head) {
        // 2. Queries.
        read_queries(head);
        const bool once = block_.groups() <= 1;
        // 3 and 4, to complete delta.
        if (!once)
            block_.for_groups([&] {
                multiply_keys();
                for (Int lane = 0; lane < block_.n; lane += WIDTH) compute_weights(lane, true);
            });
        // 3 to 6. Scores, softmax and gradients.
        bool first = true;
        block_.for_groups([&] {
            multiply_keys();
            for (Int lane = 0; lane < block_.n; lane += WIDTH) {
                compute_weights(lane, once);
                softmax_backward(lane);
            }
            accumulate(head, first);
            first = false;
        });
        // 7. dQ.
        for (Int i = 0; i < block_.n; ++i) {
            float* d_q = d_q_.data + i * d_q_.row;
            if (first) std::memset(d_q, 0, (size_t)d_q_.row * 4);
            scale_row(d_q, x_.features, (float)x_.scale);
            write_row(x_.type, d_q, x_.features, d_query(i, head));
        }
    }

    // 2. Q, dO, lse and -dlse. A query that reads no key has lse = infinity here, so P = 0, and a dO of 0.
    void read_queries(Int head) {
        const Int batch = task_.sequence.batch, token = task_.sequence.first_query + block_.queries.first;
        for (Int i = 0; i < round_up(block_.n); ++i) {
            const Int row = row_of(i, head);
            const bool reads = i < block_.n && out_.lse[row] != -__builtin_inff();
            lse_[i] = reads ? out_.lse[row] : __builtin_inff();
            delta_[i] = reads ? -out_.d_lse[row] : 0;
        }
        q_.read(block_.n, [&](Int i, float* row) {
            read_row(x_.type, address(x_.q, x_.type, batch, token + i, head), x_.features, row);
            scale_row(row, x_.features, (float)x_.scale);
        });
        g_.read(block_.n, [&](Int i, float* row) {
            read_row(x_.type, address(out_.o, x_.type, batch, token + i, head), x_.values, row);
            if (lse_[i] == __builtin_inff()) std::memset(row, 0, (size_t)x_.values * 4);
        });
    }

    // 3. The scores and dP.
    void multiply_keys() {
        block_.multiply_keys(keys_.k(), x_.features, q_.transposed, scores_);
        block_.multiply_keys(keys_.v(), x_.values, g_.transposed, d_scores_);
    }

    // 4. P = exp(s - lse) for the vector of queries at `lane`; with `sum`, delta += sum of P dP.
    void compute_weights(Int lane, bool sum) {
        const Int first = block_.group.first;
        float *const s = scores_.data + lane, *const d_p = d_scores_.data + lane;
        const Vec lse = load(lse_ + lane);
        Vec delta = load(delta_ + lane);
        Block::for_visible(block_.visible(lane), [&](Int row, bool all) {
            const Int at = (row - first) * BLOCK;
            Vec p = exp_of_negative(load(s + at) - lse);
            if (!all) p = select(block_.readers(row, lane), p, Vec{});
            store(s + at, p);
            delta += p * load(d_p + at);
        });
        if (sum) store(delta_ + lane, delta);
    }

    // 5. dS = P (dP - delta). Rows that the vector of queries does not read get 0.
    void softmax_backward(Int lane) {
        const Int first = block_.group.first;
        float *const p = scores_.data + lane, *const d_s = d_scores_.data + lane;
        const Vec delta = load(delta_ + lane);
        const Span some = block_.visible(lane).some;
        const auto clear = [&](Int row) {
            store(p + (row - first) * BLOCK, Vec{});
            store(d_s + (row - first) * BLOCK, Vec{});
        };
        for (Int row = first; row < some.first; ++row) clear(row);
        for (Int row = some.first; row < some.end; ++row) {
            const Int at = (row - first) * BLOCK;
            store(d_s + at, load(p + at) * (load(d_s + at) - delta));
        }
        for (Int row = some.end; row < block_.group.end; ++row) clear(row);
    }

    // Prefetches what will be written for queries [from, from + n), and what the next block reads.
    void prefetch_next(Int from, Int n, Int head) const {
        const Sequence& s = task_.sequence;
        const Int size = size_of(x_.type), first = block_.queries.first + from;
        for (Int i = from; i < from + n; ++i) prefetch_row<true>(d_query(i, head), x_.features * size);
        for (Int t = first + BLOCK; t < min(first + BLOCK + n, task_.queries.end); ++t) {
            prefetch_row<false>(address(x_.q, x_.type, s.batch, s.first_query + t, head), x_.features * size);
            prefetch_row<false>(address(out_.o, x_.type, s.batch, s.first_query + t, head), x_.values * size);
        }
        keys_.prefetch_next(from, n);
        for (Int row = keys_.all.first + from; row < min(keys_.all.first + from + n, keys_.all.end); ++row) {
            prefetch_row<true>(d_key(x_, out_.d_k, x_.features, task_, keys_.position(row)),
                               x_.features * size);
            prefetch_row<true>(d_key(x_, out_.d_v, x_.values, task_, keys_.position(row)), x_.values * size);
        }
    }

    // 6. dV += P^T dO, dK += dS^T Q and dQ += dS K.
    void accumulate(Int head, bool first) {
        block_.for_keys([&](Int row, Int rows, Span lanes) {
            multiply_few_rows(rows, x_.values, lanes.size(), {at(scores_, row, lanes.first), scores_.row, 1},
                              {g_.at(lanes.first), g_.rows.row}, keys_.d_v(row), true);
            multiply_few_rows(rows, x_.features, lanes.size(),
                              {at(d_scores_, row, lanes.first), d_scores_.row, 1},
                              {q_.at(lanes.first), q_.rows.row}, keys_.d_k(row), true);
        });
        block_.for_queries([&](Int i, Int n, Span rows) {
            prefetch_next(i, n, head);
            multiply_few_rows(n, x_.features, rows.size(), {at(d_scores_, rows.first, i), 1, d_scores_.row},
                              keys_.k(rows.first), {d_q_.data + i * d_q_.row, d_q_.row}, !first);
        });
    }

    float* at(Rows scores, Int row, Int lane) const {
        return scores.data + (row - block_.group.first) * BLOCK + lane;
    }

    Int row_of(Int i, Int head) const {
        const Sequence& s = task_.sequence;
        return (s.batch * x_.queries + s.first_query + block_.queries.first + i) * x_.heads + head;
    }

    char* d_query(Int i, Int head) const {
        return (char*)out_.d_q + row_of(i, head) * x_.features * size_of(x_.type);
    }

    const Window& x_;
    const WindowGradients& out_;
    const WindowTask& task_;
    Keys keys_;
    Block block_;
    QueryRows q_, g_;
    Rows scores_, d_scores_, d_q_;
    float *lse_, *delta_;
};

// 8. Adds the gradients of the keys that `first` shares with tasks after it, and writes them.
Status add_partials(const Window& x, const WindowGradients& out, const WindowTask& first) {
    Workspace memory;
    const Int floats = partial_floats(x);
    float* sum = memory.floats(floats);
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int position = first.keys.first; position < first.keys.end; ++position) {
        const Sequence& s = first.sequence;
        if (!shared(first, position) || (!first.first && position < (&first)[-1].keys.end)) continue;
        if (x.padding && x.padding[s.batch * x.keys + s.first_key + position]) continue;
        std::memcpy(sum, partial(x, first, position), (size_t)floats * 4);
        for (const WindowTask* task = &first; !task->last && position >= task[1].keys.first; ++task) {
            const float* from = partial(x, task[1], position);
            for (Int i = 0; i < floats; i += WIDTH) store(sum + i, load(sum + i) + load(from + i));
        }
        write_gradients(x, out, first, position, sum, sum + round_up(x.features));
    }
    return SUCCESS;
}

Status run(const Window& x, const WindowGradients& out) {
    advise_huge_pages(x, out.d_q, x.queries, x.heads, x.features);
    advise_huge_pages(x, out.d_k, x.keys, x.groups, x.features);
    advise_huge_pages(x, out.d_v, x.keys, x.groups, x.values);
    Workspace memory;
    const Tasks tasks(x, memory);
    Int partials = 0;
    for (Int i = 0; i < tasks.size(); ++i) partials += tasks[i].keys.size() * partial_floats(x);
    // Enough for all keys of a task; what is never written takes no physical memory.
    float* at = tasks.threads > 1 ? memory.floats(partials) : nullptr;
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int i = 0; i < tasks.size() && at; at += tasks[i++].keys.size() * partial_floats(x))
        tasks[i].partial = at;
    const Status status = parallel_for(tasks.size(), tasks.threads, [&](Int i) {
        Workspace own;
        Backward backward(x, out, tasks[i], own);
        if (own.failed()) return OUT_OF_MEMORY;
        backward.run();
        return SUCCESS;
    });
    if (status != SUCCESS) return status;
    return parallel_for(tasks.size(), tasks.threads, [&](Int i) { return add_partials(x, out, tasks[i]); });
}

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(window_backward)(const Window* x, const WindowGradients* out) {
    return UNROLLED_ISA::run(*x, *out);
}
