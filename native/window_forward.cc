// Sliding-window attention, forward: an online softmax over groups of at most MAX_KEYS keys, which for most
// windows is one group.
//
// For each block of queries of a task:
// 1. Slide the buffer of keys and values to those that the block reads.
// For each query head:
// 2. Read, scale and transpose the queries.
// For each group of keys:
// 3. Scores s = K Q^T, a row for each key.
// 4. Softmax: the new maximum, P = exp(s - max) and its sums; keys that a query does not read get 0.
// 5. O = O exp(old max - max) + P V, tile by tile of queries, which prefetches for the next block.
// And for the query head:
// 6. Divide by the sums; write O and lse = max + log sum.
#include "kernels.h"
#include "window.h"

namespace UNROLLED_ISA {
namespace {

using namespace window;

class Forward {
  public:
    Forward(const Window& x, const WindowOutputs& out, const WindowTask& task, Workspace& memory)
        : x_(x),
          out_(out),
          task_(task),
          keys_(x, task, memory, false),
          block_(x, task, keys_),
          q_(x.features, memory),
          scores_(memory.rows(block_.max_keys(), BLOCK)),
          o_(memory.rows(BLOCK, round_up(x.values))),
          maxima_(memory.floats(BLOCK)),
          sums_(memory.floats(BLOCK)),
          factors_(memory.floats(BLOCK)) {}

    void run() {
        const Int per_group = x_.heads / x_.groups;
        for (Int t = task_.queries.first; t < task_.queries.end; t += BLOCK) {
            block_.begin({t, min(task_.queries.end, t + BLOCK)});
            // 1. Keys and values.
            keys_.move_to(keys_of(x_, task_.sequence, block_.queries), [](Int) {});
            for (Int h = task_.first_head * per_group; h < (task_.first_head + 1) * per_group; ++h) attend(h);
        }
    }

  private:
    void attend(Int head) {
        const Int batch = task_.sequence.batch, token = task_.sequence.first_query + block_.queries.first;
        // 2. Queries.
        q_.read(block_.n, [&](Int i, float* row) {
            read_row(x_.type, address(x_.q, x_.type, batch, token + i, head), x_.features, row);
            scale_row(row, x_.features, (float)x_.scale);
        });
        for (Int lane = 0; lane < BLOCK; lane += WIDTH) {
            store(maxima_ + lane, broadcast(-__FLT_MAX__));
            store(sums_ + lane, Vec{});
        }
        bool first = true;
        block_.for_groups([&] {
            // 3. Scores.
            block_.multiply_keys(keys_.k(), x_.features, q_.transposed, scores_);
            // 4. Softmax.
            for (Int lane = 0; lane < block_.n; lane += WIDTH) softmax(lane);
            // 5. Outputs.
            for (Int i = 0; i < block_.n && !first; ++i)
                scale_row(o_.data + i * o_.row, x_.values, factors_[i]);
            block_.for_queries([&](Int i, Int n, Span rows) {
                prefetch_next(i, n, head);
                multiply_few_rows(
                    n, x_.values, rows.size(),
                    {scores_.data + (rows.first - block_.group.first) * scores_.row + i, 1, scores_.row},
                    keys_.v(rows.first), {o_.data + i * o_.row, o_.row}, !first);
            });
            first = false;
        });
        // 6. Division.
        for (Int i = 0; i < block_.n; ++i) write(i, row_of(block_.queries.first + i, head));
    }

    // 4. P = exp(s - max) for the vector of queries at `lane`, with the maximum over the groups so far.
    void softmax(Int lane) {
        const Visible visible = block_.visible(lane);
        const Int first = block_.group.first;
        const auto s = [&](Int row) { return scores_.data + (row - first) * BLOCK + lane; };
        const Vec before = load(maxima_ + lane);
        Vec top = before;
        block_.for_visible(visible, [&](Int row, bool all) {
            Vec x = load(s(row));
            if (!all) store(s(row), x = select(block_.readers(row, lane), x, broadcast(-__builtin_inff())));
            top = max(top, x);
        });
        const Vec factor = exp_of_negative(before - top);
        Vec total = load(sums_ + lane) * factor;
        for (Int row = first; row < visible.some.first; ++row) store(s(row), Vec{});
        for (Int row = visible.some.first; row < visible.some.end;) {
            const Int end = min(row + 32, visible.some.end);
            Vec part{};  // sums of 32 terms, which are then added: a sum of many terms one by one loses
                         // digits
            for (; row < end; ++row) {
                const Vec p = exp_of_negative(load(s(row)) - top);
                store(s(row), p);
                part += p;
            }
            total += part;
        }
        for (Int row = visible.some.end; row < block_.group.end; ++row) store(s(row), Vec{});
        store(maxima_ + lane, top);
        store(sums_ + lane, total);
        store(factors_ + lane, factor);
    }

    // Prefetches the outputs of queries [from, from + n) for writing, and what the next block reads.
    void prefetch_next(Int from, Int n, Int head) const {
        const Sequence& s = task_.sequence;
        const Int first = block_.queries.first + from, size = size_of(x_.type);
        for (Int t = first; t < first + n; ++t) prefetch_row<true>(output(row_of(t, head)), x_.values * size);
        for (Int t = first + BLOCK; t < min(first + BLOCK + n, task_.queries.end); ++t)
            prefetch_row<false>(address(x_.q, x_.type, s.batch, s.first_query + t, head), x_.features * size);
        keys_.prefetch_next(from, n);
    }

    Int row_of(Int query, Int head) const {
        const Sequence& s = task_.sequence;
        return (s.batch * x_.queries + s.first_query + query) * x_.heads + head;
    }
    char* output(Int row) const { return (char*)out_.o + row * x_.values * size_of(x_.type); }

    void write(Int i, Int row) const {
        const bool nothing = sums_[i] == 0;
        float* o = o_.data + i * o_.row;
        if (nothing) std::memset(o, 0, (size_t)o_.row * 4);
        else scale_row(o, x_.values, 1 / sums_[i]);
        write_row(x_.type, o, x_.values, output(row));
        out_.lse[row] = nothing ? -__builtin_inff() : maxima_[i] + __builtin_logf(sums_[i]);
    }

    const Window& x_;
    const WindowOutputs& out_;
    const WindowTask& task_;
    Keys keys_;
    Block block_;
    QueryRows q_;
    Rows scores_, o_;
    float *maxima_, *sums_, *factors_;
};

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(window_forward)(const Window* x, const WindowOutputs* out) {
    using namespace UNROLLED_ISA;
    advise_huge_pages(*x, out->o, x->queries, x->heads, x->values);
    Workspace memory;
    const window::Tasks tasks(*x, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    return parallel_for(tasks.size(), tasks.threads, [&](Int i) {
        Workspace own;
        Forward forward(*x, *out, tasks[i], own);
        if (own.failed()) return OUT_OF_MEMORY;
        forward.run();
        return SUCCESS;
    });
}
