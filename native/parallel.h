// How a call is divided among threads: sequences, tasks, and the smallest sizes for a second thread.
#pragma once

#include "workspace.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace UNROLLED_ISA {

using Int = int64_t;

inline constexpr Int min(Int a, Int b) { return a < b ? a : b; }
inline constexpr Int max(Int a, Int b) { return a > b ? a : b; }
inline Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }

// Below these sizes waking a second thread takes longer than it saves. A step and a linear layer of a few
// rows are bound by memory, so what counts for them is how much they read.
constexpr Int PARALLEL_MULTIPLY_ADDS = 1 << 20;
constexpr Int PARALLEL_STATE_FLOATS = 1 << 18;
constexpr Int WEIGHTS_PER_THREAD = 1 << 16;

// Threads for attention over whole sequences. `multiply_adds` is a double, since the product of all sizes may
// exceed 64 bits.
inline Int threads_for(double multiply_adds, Int threads) {
    return multiply_adds < PARALLEL_MULTIPLY_ADDS ? 1 : threads;
}

// Runs `f(i)` for i in [0, n) on the threads of torch. Returns the first failure, after which a thread takes
// no more work.
template <typename F>
inline Status parallel_for(Int n, Int threads, F&& f) {
    int32_t status = SUCCESS;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && n > 1) \
    reduction(| : status)
    for (Int i = 0; i < n; ++i)
        if (status == SUCCESS) status = f(i);
    return (Status)status;
}

// While it exists, results of its thread that are below the normal numbers become 0. The state and its
// gradient, multiplied by gates again and again, would otherwise stay subnormal, and some processors take 20
// times as long to multiply such numbers. Inputs may be subnormal: fp16 numbers are widened by way of
// subnormal ones. Nothing changes on Arm, where the setting would flush inputs too.
class FlushSubnormals {
  public:
#if defined(__SSE2__)
    explicit FlushSubnormals(bool on) : on_(on), before_(_mm_getcsr()) {
        if (on_) _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON);
    }
    ~FlushSubnormals() {
        if (on_) _mm_setcsr(before_);
    }
    FlushSubnormals(const FlushSubnormals&) = delete;

  private:
    bool on_;
    unsigned before_;
#else
    explicit FlushSubnormals(bool) {}
#endif
};

// The tokens of one sequence: a row of the batch, or a part of the only row when sequences are packed.
struct Sequence {
    Int index, batch, first_query, queries, first_key, keys;
};

template <typename Problem>
inline Sequence sequence_at(const Problem& x, Int index) {
    if (!x.offsets) return {index, index, 0, x.queries, 0, x.keys};
    const Int first = x.offsets[index], n = x.offsets[index + 1] - first;
    return {index, 0, first, n, first, n};
}

// How often the longest sequence fits into the tokens of a pack; without a pack, the number of sequences. So
// many tasks of equal size can run side by side.
template <typename Problem>
inline Int whole_sequences(const Problem& x) {
    Int longest = 0;
    for (Int i = 0; x.offsets && i < x.sequences; ++i)
        longest = max(longest, x.offsets[i + 1] - x.offsets[i]);
    return longest ? max(1, x.keys / longest) : x.sequences;
}

// What one thread computes at a time: a segment of a sequence, for the key heads [first_head, last_head) and
// the query heads that read them.
struct Task {
    Sequence sequence;
    Int first_head, last_head;
    bool first, last;  // whether the segment is the first or the last of its sequence
};

}  // namespace UNROLLED_ISA
