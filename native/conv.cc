// Causal depthwise convolution, forward and backward. It is bound by memory: whole rows of channels are
// streamed, and the rows that a token shares with its neighbours are kept as floats in a ring.
//
// For each segment of a sequence, forward:
// 1. Read the inputs before the segment, from the state where the sequence begins.
// 2. For each token: read its row, y_t = sum_l weight_l * x_(t-l), and write it.
// 3. Write the last inputs of the sequence as its state.
// Backward, for each input, those of the state included:
// 4. dx_t = sum_l weight_l * dy_(t+l), and what the gradient of the final state adds.
// 5. dweight_l += dy_(t+l) * x_t, summed in single precision over a few tokens only.
#include <algorithm>

#include "kernels.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int SEGMENT = 512;  // tokens of a task
constexpr Int SUMMED = 64;    // tokens that are summed in single precision
constexpr Int SUMS = 64;      // sums of the weights' gradients

// The tokens [from, to) of a sequence of `length` that begins at token `first` of the batch's row.
struct Segment {
    Int index, batch, first, length, from, to;
};

// The segments of all sequences. A sequence has one even if it is empty, for its state.
class Segments {
  public:
    Segments(const Conv& x, Workspace& memory) : x_(x), end_((Int*)memory.floats(2 * x.sequences)) {
        for (Int i = 0; end_ && i < x.sequences; ++i)
            end_[i] = count_ += max(1, ceil_div(sequence(i).length, SEGMENT));
    }
    Int count() const { return count_; }
    Int threads() const {
        return threads_for((double)count() * SEGMENT * (double)(x_.channels * x_.taps), x_.threads);
    }

    Segment at(Int i) const {
        const Int n = std::upper_bound(end_, end_ + x_.sequences, i) - end_;
        Segment s = sequence(n);
        s.from = (i - (n ? end_[n - 1] : 0)) * SEGMENT;
        s.to = min(s.length, s.from + SEGMENT);
        return s;
    }

  private:
    Segment sequence(Int i) const {
        if (!x_.offsets) return {i, i, 0, x_.tokens, 0, 0};
        return {i, 0, x_.offsets[i], x_.offsets[i + 1] - x_.offsets[i], 0, 0};
    }

    const Conv& x_;
    Int* end_;  // for each sequence, the number of segments up to its last one
    Int count_ = 0;
};

const float* state_row(const Conv& x, const float* state, const Segment& s, Int token) {
    return state + ((s.index + 1) * (x.taps - 1) + token) * x.channels;
}

// Input `token` of a sequence, which is one of the state if negative.
void read_input(const Conv& x, const Segment& s, Int token, float* to) {
    if (token < 0) read_row(FLOAT32, state_row(x, x.state, s, token), x.channels, to);
    else read_row(x.type, address(x.x, x.type, s.batch, s.first + token, 0), x.channels, to);
}

// The rows of the latest tokens, by their number.
class Ring {
  public:
    Ring(Int taps, Int channels, Workspace& memory)
        : taps_(taps), rows_(memory.rows(taps, round_up(channels))) {}
    float* operator[](Int token) const { return row(rows_, (token + taps_) % taps_); }

  private:
    Int taps_;
    Rows rows_;
};

// The taps as rows of whole vectors.
Rows read_weight(const Conv& x, Workspace& memory) {
    const Rows weight = memory.rows(x.taps, round_up(x.channels));
    for (Int l = 0; l < x.taps && !memory.failed(); ++l)
        read_row(FLOAT32, x.weight + l * x.channels, x.channels, row(weight, l));
    return weight;
}

Status forward(const Conv& x, const ConvOutputs& out, const Segment& s) {
    Workspace memory;
    const Rows weight = read_weight(x, memory);
    const Ring inputs(x.taps, x.channels, memory);
    float* y = memory.floats(round_up(x.channels));
    if (memory.failed()) return OUT_OF_MEMORY;
    // 1. The inputs before the segment.
    for (Int t = s.from - x.taps + 1; t < s.from; ++t) read_input(x, s, t, inputs[t]);
    // 2. Tokens.
    for (Int t = s.from; t < s.to; ++t) {
        read_input(x, s, t, inputs[t]);
        std::memset(y, 0, (size_t)weight.row * 4);
        for (Int l = 0; l < x.taps; ++l) {
            const float *taps = row(weight, l), *from = inputs[t - l];
            for (Int c = 0; c < x.channels; c += WIDTH)
                store(y + c, load(y + c) + load(taps + c) * load(from + c));
        }
        write_row(x.type, y, x.channels,
                  (char*)out.y + (s.batch * x.tokens + s.first + t) * x.channels * size_of(x.type));
    }
    // 3. The state, which may reach back into the state before the sequence.
    if (s.from == 0)
        for (Int t = s.length - x.taps + 1; t < s.length; ++t) {
            read_input(x, s, t, y);
            write_row(FLOAT32, y, x.channels, (float*)state_row(x, out.state, s, t - s.length));
        }
    return SUCCESS;
}

// `d_weight [taps, channels]` is the gradient of the taps from this segment.
Status backward(const Conv& x, const ConvGradients& out, const Segment& s, double* d_weight) {
    Workspace memory;
    const Int width = round_up(x.channels);
    const Rows weight = read_weight(x, memory);
    const Ring gradients(x.taps, x.channels, memory);
    float *input = memory.floats(width), *d_x = memory.floats(width);
    const Rows sums = {memory.zeros(x.taps * width), width};
    if (memory.failed()) return OUT_OF_MEMORY;
    const auto read_gradient = [&](Int t) {
        if (t < 0 || t >= s.length) std::memset(gradients[t], 0, (size_t)width * 4);
        else read_row(x.type, address(out.y, x.type, s.batch, s.first + t, 0), x.channels, gradients[t]);
    };
    const auto add_sums = [&] {
        for (Int l = 0; l < x.taps; ++l)
            for (Int c = 0; c < x.channels; ++c) d_weight[l * x.channels + c] += row(sums, l)[c];
        std::memset(sums.data, 0, (size_t)(x.taps * width) * 4);
    };
    const Int from = s.from == 0 ? 1 - x.taps : s.from;
    for (Int t = from; t < from + x.taps - 1; ++t) read_gradient(t);
    for (Int t = from; t < s.to; ++t) {
        read_gradient(t + x.taps - 1);
        read_input(x, s, t, input);
        // 4. Gradient of the input.
        if (t < s.length - x.taps + 1) std::memset(d_x, 0, (size_t)width * 4);
        else read_row(FLOAT32, state_row(x, out.state, s, t - s.length), x.channels, d_x);
        for (Int l = 0; l < x.taps; ++l) {
            const float *taps = row(weight, l), *from = gradients[t + l];
            float* sum = row(sums, l);
            for (Int c = 0; c < x.channels; c += WIDTH) {
                const Vec gradient = load(from + c);
                store(d_x + c, load(d_x + c) + load(taps + c) * gradient);
                // 5. Gradient of the taps.
                store(sum + c, load(sum + c) + gradient * load(input + c));
            }
        }
        if (t < 0) write_row(FLOAT32, d_x, x.channels, (float*)state_row(x, out.d_state, s, t));
        else
            write_row(x.type, d_x, x.channels,
                      (char*)out.d_x + (s.batch * x.tokens + s.first + t) * x.channels * size_of(x.type));
        if ((t - from) % SUMMED == SUMMED - 1) add_sums();
    }
    add_sums();
    return SUCCESS;
}

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(conv_forward)(const Conv* x, const ConvOutputs* out) {
    advise_huge_pages(*x, out->y, x->tokens, 1, x->channels);
    Workspace memory;
    const Segments segments(*x, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    return parallel_for(segments.count(), segments.threads(),
                        [&](Int i) { return forward(*x, *out, segments.at(i)); });
}

Status EXPORTED(conv_backward)(const Conv* x, const ConvGradients* out) {
    advise_huge_pages(*x, out->d_x, x->tokens, 1, x->channels);
    const Int n = x->taps * x->channels;
    Workspace memory;
    const Segments segments(*x, memory);
    const Int count = segments.count(), sums = min(count, SUMS);
    double* parts = (double*)memory.zeros(2 * sums * n);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Status status = parallel_for(sums, segments.threads(), [&](Int sum) {
        Status each = SUCCESS;
        for (Int i = sum; i < count && each == SUCCESS; i += sums)
            each = backward(*x, *out, segments.at(i), parts + sum * n);
        return each;
    });
    if (status != SUCCESS) return status;
    for (Int j = 0; j < n; ++j) {
        double total = 0;
        for (Int i = 0; i < sums; ++i) total += parts[i * n + j];
        out->d_weight[j] = (float)total;
    }
    return SUCCESS;
}
