// The selective scan of Mamba, forward and backward: every channel has some states, with a decay each.
//
//     h_t = e_t h_(t-1) + dt_t x_t b_t     e_t = exp(dt_t a)     y_t = sum over the states of c_t h_t
//
// dt, x and y are numbers of a channel, b and c those of a state, a and h have both axes. The lanes of a
// vector are channels, so nothing is summed across lanes but the gradients of b and c. A task takes a block
// of channels of a sequence, in chunks of tokens whose rows stay in the first-level cache as floats.
//
// Backward, with g_t the gradient of h_t:
// 1. Keep the state before each chunk.
// 2. From the last chunk to the first, compute its states anew, keep them, and then, token by token:
//    g_t = c_t dy_t + e_(t+1) g_(t+1)
//    dc_t = h_t dy_t and db_t = g_t dt_t x_t, summed over the channels
//    dx_t = dt_t g_t b_t and ddt_t = g_t e_t h_(t-1) a + g_t x_t b_t, summed over the states
//    da = g_t e_t h_(t-1) dt_t, summed over the tokens
// 3. Sum the gradients of b and c over the blocks, and that of a over the sequences.
//
// In a step of one token, the lanes are states, because they are adjacent in memory.

#include "kernels.h"
#include "prefetch.h"
#include "rows.h"
#include "sequences.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int TOKENS = 32;                  // tokens of a chunk
constexpr Int CHANNELS = 128;               // channels of a block
constexpr Int STATES = WIDTH > 8 ? 16 : 8;  // states that are in registers at a time
constexpr Int SIDE_BY_SIDE = 4;             // states whose decays are computed together
constexpr Int SUMS = 16;                    // sums of the gradients of a

Int blocks_of(const SelectiveScan& x) { return ceil_div(x.channels, CHANNELS); }

Int threads_of(const SelectiveScan& x) {
    return threads_for((double)all_tokens(x) * (double)(x.channels * x.states), x.threads);
}

// Some channels of a sequence. Rows of channels are `CHANNELS` long, rows of states `states`; what exceeds
// the sizes of the problem is 0. Arrays [states, channels] have a row for each state.
class Block {
  public:
    Block(const SelectiveScan& x, const Place& s, Int index, Workspace& memory)
        : channel(index * CHANNELS),
          channels(min(CHANNELS, x.channels - channel)),
          states(ceil_div(max(x.states, 1), STATES) * STATES),
          state(memory.zeros(size())),
          x_(x),
          s_(s),
          rates_(memory.zeros(size())),
          inputs_(memory.floats(TOKENS * CHANNELS)),
          steps_(memory.zeros(TOKENS * CHANNELS)),
          writers_(memory.zeros(TOKENS * states)),
          readers_(memory.zeros(TOKENS * states)) {}

    // The number of floats of an array [states, channels].
    Int size() const { return states * CHANNELS; }

    void begin() {
        gather(x_.a, rates_);
        gather(x_.state + s_.index * x_.channels * x_.states, state);
    }

    // Copies these channels of a tensor [channels, states] to an array [states, channels], and back.
    void gather(const float* from, float* to) const {
        for (Int i = 0; i < channels; ++i)
            for (Int k = 0; k < x_.states; ++k) to[k * CHANNELS + i] = from[(channel + i) * x_.states + k];
    }
    void scatter(const float* from, float* to) const {
        for (Int i = 0; i < channels; ++i)
            for (Int k = 0; k < x_.states; ++k) to[(channel + i) * x_.states + k] = from[k * CHANNELS + i];
    }
    void add(const float* from, float* to) const {
        for (Int i = 0; i < channels; ++i)
            for (Int k = 0; k < x_.states; ++k) to[(channel + i) * x_.states + k] += from[k * CHANNELS + i];
    }

    // Reads the tokens [first, first + n) of the sequence.
    void read(Int first, Int n) const {
        for (Int i = 0; i < n; ++i) {
            read_channels(x_.x, x_.type, first + i, inputs_ + i * CHANNELS);
            read_row(x_.type, at(x_.b, x_.type, first + i), x_.states, writers_ + i * states);
            read_row(x_.type, at(x_.c, x_.type, first + i), x_.states, readers_ + i * states);
        }
        for (Int i = 0; i < n && steps_adjoin(); ++i)
            read_channels(x_.dt, FLOAT32, first + i, steps_ + i * CHANNELS);
        for (Int c = 0; c < channels && !steps_adjoin(); ++c) {
            const float* const from = (const float*)at(x_.dt, FLOAT32, first) + (channel + c) * x_.dt.head;
            for (Int i = 0; i < n; ++i) steps_[i * CHANNELS + c] = from[i * x_.dt.token];
        }
    }
    void read_channels(const Tensor& tensor, Int type, Int t, float* to) const {
        read_row(type, at(tensor, type, t) + channel * size_of(type), channels, to);
    }
    // Lets `advance` request the chunk at `first`, if there is one, of the inputs and of `d_y`.
    void expect(Int first, const Tensor* d_y = nullptr) {
        prefetcher_.clear();
        if (first < 0 || first >= s_.length) return;
        const Int n = min(TOKENS, s_.length - first);
        const auto add = [&](const Tensor& tensor, Int type, Int from, Int width) {
            const Int size = size_of(type);
            prefetcher_.add(at(tensor, type, first) + from * size, tensor.token * size, n, width * size);
        };
        add(x_.b, x_.type, 0, x_.states);
        add(x_.c, x_.type, 0, x_.states);
        if (d_y) add(*d_y, x_.type, channel, channels);
        add(x_.x, x_.type, channel, channels);
        if (steps_adjoin()) add(x_.dt, FLOAT32, channel, channels);
        else
            prefetcher_.add(at(x_.dt, FLOAT32, first) + channel * x_.dt.head * 4, x_.dt.head * 4, channels,
                            n * 4);
        prefetcher_.spread_over(ceil_div(channels, WIDTH) * (states / STATES) * TOKENS);
    }
    // Writes a row of these channels to a contiguous tensor.
    void write_channels(const float* from, Int type, Int t, void* to) const {
        write_row(type, from, channels, (char*)to + (row(t) * x_.channels + channel) * size_of(type));
    }
    // The row of a token in a contiguous tensor.
    Int row(Int t) const { return s_.batch * x_.tokens + s_.first + t; }

    Vec step(Int i, Int lane) const { return load(steps_ + i * CHANNELS + lane); }
    Vec input(Int i, Int lane) const { return load(inputs_ + i * CHANNELS + lane); }
    Vec writer(Int i, Int k) const { return broadcast(writers_[i * states + k]); }
    Vec reader(Int i, Int k) const { return broadcast(readers_[i * states + k]); }
    Vec rate(Int k, Int lane) const { return load(rates_ + k * CHANNELS + lane); }

    // Moves the state of some lanes past n tokens, some states at a time. Calls `keep(i, k, e, h)` after each
    // token for each state, and `end(i, first)` after each token, for the states from `first` on.
    template <typename Keep, typename End>
    void advance(Int n, Int lane, float* at, Keep&& keep, End&& end) {
        for (Int first = 0; first < states; first += STATES) {
            Vec h[STATES];
            for (Int k = 0; k < STATES; ++k) h[k] = load(at + (first + k) * CHANNELS + lane);
            for (Int i = 0; i < n; ++i) {
                const Vec dt = step(i, lane), written = dt * input(i, lane);
                prefetcher_.issue();
#pragma GCC unroll 16
                for (Int k = 0; k < STATES; k += SIDE_BY_SIDE) {
                    Vec e[SIDE_BY_SIDE];
#pragma GCC unroll 16
                    for (Int j = 0; j < SIDE_BY_SIDE; ++j) e[j] = dt * rate(first + k + j, lane);
                    exp_of_negative(e);
#pragma GCC unroll 16
                    for (Int j = 0; j < SIDE_BY_SIDE; ++j) {
                        h[k + j] = h[k + j] * e[j] + written * writer(i, first + k + j);
                        keep(i, first + k + j, e[j], h[k + j]);
                    }
                }
                end(i, first);
            }
            for (Int k = 0; k < STATES; ++k) store(at + (first + k) * CHANNELS + lane, h[k]);
        }
    }

    const Int channel, channels, states;
    float* const state;

  private:
    // Whether the step sizes of all channels of a token are adjacent.
    bool steps_adjoin() const { return x_.dt.head == 1; }

    const char* at(const Tensor& tensor, Int type, Int t) const {
        return address(tensor, type, s_.batch, s_.first + t, 0);
    }

    const SelectiveScan& x_;
    const Place s_;
    float *const rates_, *const inputs_, *const steps_, *const writers_, *const readers_;
    Prefetcher prefetcher_;
};

Status forward(const SelectiveScan& x, const SelectiveScanOutputs& out, const Place& s, Int index) {
    Workspace memory;
    Block block(x, s, index, memory);
    float* const y = memory.floats(TOKENS * CHANNELS);
    if (memory.failed()) return OUT_OF_MEMORY;
    block.begin();
    for (Int t = 0; t < s.length; t += TOKENS) {
        const Int n = min(TOKENS, s.length - t);
        block.read(t, n);
        block.expect(t + TOKENS);
        for (Int lane = 0; lane < block.channels; lane += WIDTH) {
            Vec total{};
            block.advance(
                n, lane, block.state,
                [&](Int i, Int k, Vec, Vec h)
                    __attribute__((always_inline)) { total += h * block.reader(i, k); },
                [&](Int i, Int first) __attribute__((always_inline)) {
                    float* const at = y + i * CHANNELS + lane;
                    store(at, first ? load(at) + total : total);
                    total = Vec{};
                });
        }
        for (Int i = 0; i < n; ++i) block.write_channels(y + i * CHANNELS, x.type, t + i, out.y);
    }
    block.scatter(block.state, out.state + s.index * x.channels * x.states);
    return SUCCESS;
}

// One token of a sequence, for a block of channels.
Status step(const SelectiveScan& x, const SelectiveScanOutputs& out, Int row, Int block) {
    const Int N = x.states, channel = block * CHANNELS, n = min(CHANNELS, x.channels - channel);
    Workspace memory;
    float *const inputs = memory.floats(CHANNELS), *const y = memory.floats(CHANNELS);
    float *const writers = memory.floats(round_up(N)), *const readers = memory.floats(round_up(N));
    if (memory.failed()) return OUT_OF_MEMORY;
    const auto at = [&](const Tensor& tensor, Int type) { return address(tensor, type, row, 0, 0); };
    read_row(x.type, at(x.x, x.type) + channel * size_of(x.type), n, inputs);
    read_row(x.type, at(x.b, x.type), N, writers);
    read_row(x.type, at(x.c, x.type), N, readers);
    const float *dt = (const float*)at(x.dt, FLOAT32), *rates = x.a + channel * N;
    const float* before = x.state + (row * x.channels + channel) * N;
    float* after = out.state + (row * x.channels + channel) * N;
    for (Int c = 0; c < n; ++c, rates += N, before += N, after += N) {
        const Vec size = broadcast(dt[(channel + c) * x.dt.head]), written = size * broadcast(inputs[c]);
        Vec total{};
        for (Int k = 0; k < N; k += WIDTH) {
            const Int left = N - k;
            const Vec decay = exp_of_negative(size * load_first(rates + k, left));
            const Vec h = load_first(before + k, left) * decay + written * load_first(writers + k, left);
            store_first(after + k, left, h);
            total += h * load_first(readers + k, left);
        }
        y[c] = sum(total);
    }
    write_row(x.type, y, n, (char*)out.y + (row * x.channels + channel) * size_of(x.type));
    return SUCCESS;
}

// The gradients of a block of channels. Those of b and c are sums over these channels only.
class BlockGradients {
  public:
    BlockGradients(const SelectiveScan& x, const SelectiveScanGradients& out, const Place& s, Int index,
                   Workspace& memory)
        : x_(x),
          out_(out),
          s_(s),
          block_(x, s, index, memory),
          kept_(memory.floats(ceil_div(s.length, TOKENS) * block_.size())),
          d_state_(memory.zeros(block_.size())),
          d_rates_(memory.zeros(block_.size())),
          d_y_(memory.floats(TOKENS * CHANNELS)),
          d_x_(memory.floats(TOKENS * CHANNELS)),
          d_steps_(memory.zeros(TOKENS * CHANNELS)),
          decays_(memory.floats(TOKENS * lanes())),
          states_(memory.floats((TOKENS + 1) * lanes())),
          d_writers_(memory.floats(TOKENS * lanes())),
          d_readers_(memory.floats(TOKENS * lanes())) {}

    // Adds to d_a [channels, states]; writes d_b and d_c [batch, tokens, states].
    void run(float* d_a, float* d_b, float* d_c) {
        block_.begin();
        // 1. The states before the chunks.
        for (Int t = 0; t < s_.length; t += TOKENS) {
            std::memcpy(kept_ + t / TOKENS * block_.size(), block_.state, (size_t)block_.size() * 4);
            const Int n = min(TOKENS, s_.length - t);
            block_.read(t, n);
            block_.expect(t + TOKENS);
            for (Int lane = 0; lane < block_.channels; lane += WIDTH)
                block_.advance(n, lane, block_.state, [](Int, Int, Vec, Vec) {}, [](Int, Int) {});
        }
        // 2. The gradients, backwards.
        block_.gather(out_.state + s_.index * x_.channels * x_.states, d_state_);
        for (Int t = (ceil_div(s_.length, TOKENS) - 1) * TOKENS; t >= 0; t -= TOKENS) chunk(t, d_b, d_c);
        block_.scatter(d_state_, out_.d_state + s_.index * x_.channels * x_.states);
        block_.add(d_rates_, d_a);
    }

  private:
    // The number of floats that all states of some lanes take.
    Int lanes() const { return block_.states * WIDTH; }

    void chunk(Int t, float* d_b, float* d_c) {
        const Int n = min(TOKENS, s_.length - t);
        block_.read(t, n);
        block_.expect(t - TOKENS, &out_.y);
        for (Int i = 0; i < n; ++i) block_.read_channels(out_.y, x_.type, t + i, d_y_ + i * CHANNELS);
        std::memset(d_writers_, 0, (size_t)(n * lanes()) * 4);
        std::memset(d_readers_, 0, (size_t)(n * lanes()) * 4);
        for (Int lane = 0; lane < block_.channels; lane += WIDTH) {
            replay(kept_ + t / TOKENS * block_.size(), n, lane);
            for (Int first = 0; first < block_.states; first += STATES) reverse(n, lane, first);
        }
        for (Int i = 0; i < n; ++i) {
            block_.write_channels(d_x_ + i * CHANNELS, x_.type, t + i, out_.d_x);
            block_.write_channels(d_steps_ + i * CHANNELS, FLOAT32, t + i, out_.d_dt);
            for (Int k = 0; k < x_.states; ++k) {
                const Int at = block_.row(t + i) * x_.states + k;
                d_b[at] = sum(load(place(d_writers_, i, k)));
                d_c[at] = sum(load(place(d_readers_, i, k)));
            }
        }
    }

    // The decays and states of a chunk.
    void replay(float* before, Int n, Int lane) {
        for (Int k = 0; k < block_.states; ++k)
            store(place(states_, 0, k), load(before + k * CHANNELS + lane));
        block_.advance(
            n, lane, before,
            [&](Int i, Int k, Vec e, Vec h) __attribute__((always_inline)) {
                store(place(decays_, i, k), e);
                store(place(states_, i + 1, k), h);
            },
            [](Int, Int) {});
    }

    // The gradients of a chunk by way of the states from `first` on.
    void reverse(Int n, Int lane, Int first) {
        Vec g[STATES], d_rate[STATES] = {};
        for (Int k = 0; k < STATES; ++k) g[k] = load(d_state_ + (first + k) * CHANNELS + lane);
        for (Int i = n - 1; i >= 0; --i) {
            const Vec dt = block_.step(i, lane), x = block_.input(i, lane), written = dt * x;
            const Vec d_y = load(d_y_ + i * CHANNELS + lane);
            Vec by_writer{}, by_rate{};
#pragma GCC unroll 16
            for (Int k = 0; k < STATES; ++k) {
                const Int state = first + k;
                add_to(place(d_readers_, i, state), load(place(states_, i + 1, state)) * d_y);
                g[k] += block_.reader(i, state) * d_y;
                add_to(place(d_writers_, i, state), g[k] * written);
                by_writer += g[k] * block_.writer(i, state);
                g[k] *= load(place(decays_, i, state));
                const Vec through = g[k] * load(place(states_, i, state));
                by_rate += through * block_.rate(state, lane);
                d_rate[k] += through * dt;
            }
            float *const d_x = d_x_ + i * CHANNELS + lane, *const d_step = d_steps_ + i * CHANNELS + lane;
            store(d_x, (first ? load(d_x) : Vec{}) + dt * by_writer);
            store(d_step, (first ? load(d_step) : Vec{}) + by_rate + x * by_writer);
        }
        for (Int k = 0; k < STATES; ++k) {
            store(d_state_ + (first + k) * CHANNELS + lane, g[k]);
            add_to(d_rates_ + (first + k) * CHANNELS + lane, d_rate[k]);
        }
    }

    static void add_to(float* at, Vec x) { store(at, load(at) + x); }
    float* place(float* array, Int i, Int state) const { return array + (i * block_.states + state) * WIDTH; }

    const SelectiveScan& x_;
    const SelectiveScanGradients& out_;
    const Place s_;
    Block block_;
    float *const kept_, *const d_state_, *const d_rates_, *const d_y_, *const d_x_, *const d_steps_;
    float *const decays_, *const states_, *const d_writers_, *const d_readers_;
};

// Writes sums over `count` parts of `parts`, which are `size` apart, as a row of n numbers.
void write_sum(const float* parts, Int count, Int size, Int type, Int n, float* row, void* to) {
    std::memset(row, 0, (size_t)round_up(n) * 4);
    for (Int part = 0; part < count; ++part)
        for (Int k = 0; k < n; ++k) row[k] += parts[part * size + k];
    write_row(type, row, n, to);
}

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(selective_scan_forward)(const SelectiveScan* x, const SelectiveScanOutputs* out) {
    advise_huge_pages(*x, out->y, x->tokens, 1, x->channels);
    const Int blocks = blocks_of(*x);
    return parallel_for(x->sequences * blocks, threads_of(*x), [&](Int i) {
        const FlushSubnormals flush(true);
        return forward(*x, *out, place_of(*x, i / blocks), i % blocks);
    });
}

Status EXPORTED(selective_scan_step)(const SelectiveScan* x, const SelectiveScanOutputs* out) {
    const Int blocks = blocks_of(*x);
    return parallel_for(x->sequences * blocks, threads_of(*x), [&](Int i) {
        const FlushSubnormals flush(true);
        return step(*x, *out, i / blocks, i % blocks);
    });
}

Status EXPORTED(selective_scan_backward)(const SelectiveScan* x, const SelectiveScanGradients* out) {
    advise_huge_pages(*x, out->d_x, x->tokens, 1, x->channels);
    const Int blocks = blocks_of(*x), rows = all_tokens(*x);
    const Int tokens = rows * x->states, of_rates = x->channels * x->states, sums = min(x->sequences, SUMS);
    Workspace memory;
    float *const d_b = memory.floats(blocks * tokens), *const d_c = memory.floats(blocks * tokens);
    float *const d_a = memory.zeros(sums * of_rates), *const row = memory.floats(round_up(x->states));
    if (memory.failed()) return OUT_OF_MEMORY;
    const Status status = parallel_for(sums * blocks, threads_of(*x), [&](Int i) {
        const FlushSubnormals flush(true);
        const Int sum = i / blocks, index = i % blocks;
        for (Int sequence = sum; sequence < x->sequences; sequence += sums) {
            Workspace own;
            BlockGradients block(*x, *out, place_of(*x, sequence), index, own);
            if (own.failed()) return OUT_OF_MEMORY;
            block.run(d_a + sum * of_rates, d_b + index * tokens, d_c + index * tokens);
        }
        return SUCCESS;
    });
    if (status != SUCCESS) return status;
    // 3. The sums.
    const Int n = x->states, size = size_of(x->type);
    for (Int i = 0; i < rows; ++i) {
        write_sum(d_b + i * n, blocks, tokens, x->type, n, row, (char*)out->d_b + i * n * size);
        write_sum(d_c + i * n, blocks, tokens, x->type, n, row, (char*)out->d_c + i * n * size);
    }
    for (Int i = 0; i < x->channels; ++i)
        write_sum(d_a + i * n, sums, of_rates, FLOAT32, n, row, out->d_a + i * n);
    return SUCCESS;
}
