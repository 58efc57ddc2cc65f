// Causal depthwise convolution, with a bias and silu, forward and backward. A task takes a segment of a
// sequence, in blocks of tokens and channels whose rows stay in the first-level cache as floats.
//
// Forward, for each block:
// 1. Read its inputs and those before it, which are in the state where the sequence begins.
// 2. y_t = f(z_t), where z_t = bias + sum_l weight_l * x_(t-l).
// 3. Write the last inputs of the sequence as its state.
// Backward, for each block, with the inputs of the state before the first token:
// 4. dz_t = dy_t f'(z_t), where z_t is computed anew.
// 5. dx_t = sum_l weight_l * dz_(t+l), and what the gradient of the final state adds.
// 6. dweight_l += dz_(t+l) * x_t and dbias += dz_t, summed in single precision over one block only.

#include "functions.h"
#include "kernels.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int SEGMENT = 512;   // tokens of a task
constexpr Int TOKENS = 32;     // tokens of a block
constexpr Int CHANNELS = 128;  // channels of a block
constexpr Int SUMS = 64;       // sums of the gradients of weight and bias

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
        Int n = 0;
        for (Int last = x_.sequences; n < last;) {
            const Int middle = n + (last - n) / 2;
            if (end_[middle] <= i) n = middle + 1;
            else last = middle;
        }
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

// Some channels of a segment.
struct Block {
    const Conv& x;
    const Segment& s;
    Int channel, channels;

    Int past() const { return x.taps - 1; }

    // Row `token` < 0 of the state of this sequence in `state`.
    const float* state_row(const float* state, Int token) const {
        return state + ((s.index + 1) * past() + token) * x.channels + channel;
    }
    const char* at(const Tensor& tensor, Int token) const {
        return address(tensor, x.type, s.batch, s.first + token, 0) + channel * size_of(x.type);
    }
    // In a contiguous tensor.
    char* at(void* tensor, Int token) const {
        const Int row = s.batch * x.tokens + s.first + token;
        return (char*)tensor + (row * x.channels + channel) * size_of(x.type);
    }

    // Reads the inputs [from, to); zeros before the state and after the sequence.
    void read_inputs(Int from, Int to, float* rows) const {
        for (Int t = from; t < to; ++t, rows += CHANNELS) {
            if (t < -past() || t >= s.length) std::memset(rows, 0, CHANNELS * 4);
            else if (t < 0) read_row(FLOAT32, state_row(x.state, t), channels, rows);
            else read_row(x.type, at(x.x, t), channels, rows);
        }
    }
};

// Calls `f` with each block of channels.
template <typename F>
void for_channels(const Conv& x, const Segment& s, F&& f) {
    for (Int c = 0; c < x.channels; c += CHANNELS) f(Block{x, s, c, min(CHANNELS, x.channels - c)});
}

// The taps and the bias of a block of channels.
class Filter {
  public:
    Filter(const Conv& x, Workspace& memory) : rows_(memory.zeros((x.taps + 1) * CHANNELS)) {}

    void read(const Block& b) {
        for (Int l = 0; l < b.x.taps; ++l)
            read_row(FLOAT32, b.x.weight + l * b.x.channels + b.channel, b.channels, rows_ + l * CHANNELS);
        if (b.x.bias) read_row(FLOAT32, b.x.bias + b.channel, b.channels, rows_ + b.x.taps * CHANNELS);
    }
    Vec tap(Int l, Int c) const { return load(rows_ + l * CHANNELS + c); }

    // z of the input in row `at`, which follows those of earlier tokens.
    Vec operator()(Int taps, const float* at, Int c) const {
        Vec z = tap(taps, c);
        for (Int l = 0; l < taps; ++l) z += tap(l, c) * load(at - l * CHANNELS + c);
        return z;
    }

  private:
    float* rows_;
};

// TAPS is the number of taps if it is known to the compiler, or 0.
template <Int TAPS>
Status forward(const Conv& x, const ConvOutputs& out, const Segment& s) {
    Workspace memory;
    const Int taps = TAPS ? TAPS : x.taps, past = taps - 1;
    Filter filter(x, memory);
    float* inputs = memory.floats((past + TOKENS) * CHANNELS);  // from `past` tokens before the block on
    float* y = memory.floats(CHANNELS);
    if (memory.failed()) return OUT_OF_MEMORY;
    for_channels(x, s, [&](const Block& b) {
        filter.read(b);
        for (Int t = s.from; t < s.to; t += TOKENS) {
            const Int n = min(TOKENS, s.to - t);
            // 1. Inputs. The last rows of one block are the first ones of the next.
            if (t == s.from) b.read_inputs(t - past, t, inputs);
            else std::memmove(inputs, inputs + TOKENS * CHANNELS, (size_t)(past * CHANNELS) * 4);
            b.read_inputs(t, t + n, inputs + past * CHANNELS);
            // 2. Outputs.
            for (Int i = 0; i < n; ++i) {
                for (Int c = 0; c < b.channels; c += WIDTH) {
                    const Vec z = filter(taps, inputs + (past + i) * CHANNELS, c);
                    store(y + c, x.activation ? with_slope(SILU, z).value : z);
                }
                write_row(x.type, y, b.channels, b.at(out.y, t + i));
            }
        }
        // 3. The state, which may reach back into the state before the sequence.
        for (Int t = s.length - past; s.from == 0 && t < s.length; ++t) {
            b.read_inputs(t, t + 1, y);
            write_row(FLOAT32, y, b.channels, (float*)b.state_row(out.state, t - s.length));
        }
    });
    return SUCCESS;
}

// `d_filter [taps + 1, channels]` is the gradient of the taps and the bias from this segment.
template <Int TAPS>
Status backward(const Conv& x, const ConvGradients& out, const Segment& s, double* d_filter) {
    Workspace memory;
    const Int taps = TAPS ? TAPS : x.taps, past = taps - 1, from = s.from == 0 ? -past : s.from;
    Filter filter(x, memory);
    float* inputs = memory.floats((2 * past + TOKENS) * CHANNELS);  // from `past` tokens before the block on
    float* gradients = memory.floats((past + TOKENS) * CHANNELS);   // dz from its first token on
    float *d_x = memory.floats(CHANNELS), *sums = memory.floats((taps + 1) * CHANNELS);
    if (memory.failed()) return OUT_OF_MEMORY;
    for_channels(x, s, [&](const Block& b) {
        // 4. Gradients of z at the tokens [first, last); `at` is the input of the first one.
        const auto read_gradients = [&](Int first, Int last, const float* at, float* to) {
            for (Int t = first; t < last; ++t, at += CHANNELS, to += CHANNELS) {
                if (t < 0 || t >= s.length) {
                    std::memset(to, 0, CHANNELS * 4);
                    continue;
                }
                read_row(x.type, b.at(out.y, t), b.channels, to);
                for (Int c = 0; x.activation && c < b.channels; c += WIDTH)
                    store(to + c, load(to + c) * with_slope(SILU, filter(taps, at, c)).slope);
            }
        };
        filter.read(b);
        for (Int t = from; t < s.to; t += TOKENS) {
            const Int n = min(TOKENS, s.to - t);
            if (t == from) {
                b.read_inputs(t - past, t + past, inputs);
                read_gradients(t, t + past, inputs + past * CHANNELS, gradients);
            } else {
                std::memmove(inputs, inputs + TOKENS * CHANNELS, (size_t)(2 * past * CHANNELS) * 4);
                std::memmove(gradients, gradients + TOKENS * CHANNELS, (size_t)(past * CHANNELS) * 4);
            }
            float *const ahead = inputs + 2 * past * CHANNELS, *const at = inputs + past * CHANNELS;
            b.read_inputs(t + past, t + past + n, ahead);
            read_gradients(t + past, t + past + n, ahead, gradients + past * CHANNELS);
            std::memset(sums, 0, (size_t)((taps + 1) * CHANNELS) * 4);
            for (Int i = 0; i < n; ++i) {
                // 5. Gradient of the input.
                const Int token = t + i;
                if (token < s.length - past) std::memset(d_x, 0, CHANNELS * 4);
                else read_row(FLOAT32, b.state_row(out.state, token - s.length), b.channels, d_x);
                for (Int c = 0; c < b.channels; c += WIDTH) {
                    const Vec input = load(at + i * CHANNELS + c);
                    Vec total = load(d_x + c);
                    for (Int l = 0; l < taps; ++l) {
                        const Vec gradient = load(gradients + (i + l) * CHANNELS + c);
                        total += filter.tap(l, c) * gradient;
                        // 6. Gradients of the taps and the bias.
                        float* sum = sums + l * CHANNELS + c;
                        store(sum, load(sum) + gradient * input);
                    }
                    store(d_x + c, total);
                    float* sum = sums + taps * CHANNELS + c;
                    store(sum, load(sum) + load(gradients + i * CHANNELS + c));
                }
                if (token < 0) write_row(FLOAT32, d_x, b.channels, (float*)b.state_row(out.d_state, token));
                else write_row(x.type, d_x, b.channels, b.at(out.d_x, token));
            }
            for (Int l = 0; l <= taps; ++l)
                for (Int c = 0; c < b.channels; ++c)
                    d_filter[l * x.channels + b.channel + c] += sums[l * CHANNELS + c];
        }
    });
    return SUCCESS;
}

// Calls `f` with the number of taps as a `Count`: 4 is what the published layers have.
template <typename F>
Status with_taps(Int taps, F&& f) {
    return taps == 4 ? f(Count<4>()) : f(Count<0>());
}

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(conv_forward)(const Conv* x, const ConvOutputs* out) {
    advise_huge_pages(*x, out->y, x->tokens, 1, x->channels);
    Workspace memory;
    const Segments segments(*x, memory);
    if (memory.failed()) return OUT_OF_MEMORY;
    return parallel_for(segments.count(), segments.threads(), [&](Int i) {
        return with_taps(x->taps,
                         [&](auto taps) { return forward<decltype(taps)::value>(*x, *out, segments.at(i)); });
    });
}

Status EXPORTED(conv_backward)(const Conv* x, const ConvGradients* out) {
    advise_huge_pages(*x, out->d_x, x->tokens, 1, x->channels);
    const Int of_taps = x->taps * x->channels, n = of_taps + x->channels;
    Workspace memory;
    const Segments segments(*x, memory);
    const Int count = segments.count(), sums = min(count, SUMS);
    double* parts = (double*)memory.zeros(2 * sums * n);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Status status = parallel_for(sums, segments.threads(), [&](Int sum) {
        Status each = SUCCESS;
        for (Int i = sum; i < count && each == SUCCESS; i += sums)
            each = with_taps(x->taps, [&](auto taps) {
                return backward<decltype(taps)::value>(*x, *out, segments.at(i), parts + sum * n);
            });
        return each;
    });
    if (status != SUCCESS) return status;
    for (Int j = 0; j < n; ++j) {
        double total = 0;
        for (Int i = 0; i < sums; ++i) total += parts[i * n + j];
        if (j < of_taps) out->d_weight[j] = (float)total;
        else if (out->d_bias) out->d_bias[j - of_taps] = (float)total;
    }
    return SUCCESS;
}
