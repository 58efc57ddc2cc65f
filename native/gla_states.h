// The states of a backward pass, of key heads that go along together from chunk to chunk: shared by
// `gla_backward.cc` and `dplr_backward.cc`.
#pragma once

#include "gla_chunk.h"

namespace UNROLLED_ISA {

// B [cols, rows] = A^T for matrices of whole vectors.
inline void transpose_state(Int rows, Int cols, const float* a, Int a_row, Rows b) {
    for (Int i = 0; i < rows; ++i)
        for (Int j = 0; j < cols; ++j) row(b, j)[i] = a[i * a_row + j];
}

class BackwardStates {
  protected:
    BackwardStates(const Gla& x, const Sequence& s, Int first, Int last, Workspace& memory)
        : s_(s),
          first_(first),
          last_(last),
          spans_(ceil_div(s.keys, GLA_CHUNK * SPAN)),
          R_(round_up(x.features)),
          M_(round_up(x.values)),
          gla_(x),
          kept_(memory.zeros((last - first) * spans_ * x.values * R_)),
          states_(memory.zeros((last - first) * SPAN * x.values * R_)),
          d_states_(memory.rows((last - first) * x.features, M_)),
          d_states_T_{memory.zeros((last - first) * x.values * R_), R_} {}

    template <typename F>
    void for_heads(F&& f) {
        for (group_ = first_; group_ < last_; ++group_) {
            d_state_ = {row(d_states_, (group_ - first_) * gla_.features), M_};
            d_state_T_ = {row(d_states_T_, (group_ - first_) * gla_.values), R_};
            f();
        }
    }

    // From the last chunk to the first, for each head: calls `backward(chunk, state before it)`, after
    // `advance(chunk, state before it, state after it)` has computed the states of its span again.
    template <typename Advance, typename Backward>
    void go_back(Int chunks, Advance&& advance, Backward&& backward) {
        for (Int span = spans_ - 1; span >= 0; --span) {
            const Int first = span * SPAN, last = min(first + SPAN, chunks) - 1;
            const auto before = [&](Int c) { return c == first ? kept(span) : state(c - first); };
            for (Int c = first; c < last; ++c) for_heads([&] { advance(c, before(c), before(c + 1)); });
            for (Int c = last; c >= first; --c) for_heads([&] { backward(c, before(c)); });
        }
    }

    // The states of the current head, transposed.
    Rows kept(Int span) const { return {kept_ + ((group_ - first_) * spans_ + span) * gla_.values * R_, R_}; }
    Rows state(Int chunk) const {
        return {states_ + ((group_ - first_) * SPAN + chunk) * gla_.values * R_, R_};
    }
    Int place_in_states() const { return (s_.index * gla_.groups + group_) * gla_.features * gla_.values; }

    // Between `d_state_` and states [sequences, groups, features, values].
    void read_state(const float* from) const {
        for (Int r = 0; r < gla_.features; ++r)
            read_row(FLOAT32, from + place_in_states() + r * gla_.values, gla_.values, row(d_state_, r));
    }
    void write_state(float* to) const {
        for (Int r = 0; r < gla_.features; ++r)
            write_row(FLOAT32, row(d_state_, r), gla_.values, to + place_in_states() + r * gla_.values);
    }
    void transpose_d_state(Rows to) const {
        transpose_state(gla_.features, gla_.values, d_state_.data, M_, to);
    }

    // Adds the sums of the rows of S * dS to dF_C.
    void add_decay_gradient(Rows state_T, float* d_decay) const {
        for (Int r = 0; r < gla_.features; r += WIDTH) {
            Vec sums[4]{};
            for (Int m = 0; m < gla_.values; ++m)
                sums[m % 4] += load(row(state_T, m) + r) * load(row(d_state_T_, m) + r);
            store(d_decay + r, load(d_decay + r) + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
        }
    }

    const Sequence s_;
    const Int first_, last_, spans_, R_, M_;
    Int group_ = 0;                 // the current head
    Rows d_state_{}, d_state_T_{};  // dS of the current head, in both layouts

  private:
    const Gla& gla_;
    float *kept_, *states_;
    Rows d_states_, d_states_T_;
};

}  // namespace UNROLLED_ISA
