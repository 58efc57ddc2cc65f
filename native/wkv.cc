// The weighted averages of RWKV-4, forward and backward. With sums num and den that decay, every channel has
//
//     o_t = (exp(k_t + u) v_t + num_(t-1)) / (exp(k_t + u) + den_(t-1))
//     num_t = exp(d) num_(t-1) + exp(k_t) v_t       den_t = exp(d) den_(t-1) + exp(k_t)
//
// Both sums are kept times exp(-m_t) with m_t = max(m_(t-1) + d, k_t). Of two weights that are added, the
// larger is then exp(0), so one exponential suffices for both. Where d is small, m + d would be rounded the
// same way for many tokens, which changes the decay. So what the rounding lost is kept beside m, and added to
// the next d.
//
// The lanes of a vector are channels, so nothing is summed across lanes. A task takes a block of channels of
// a sequence, in chunks of tokens whose rows stay in the first-level cache.
//
// Backward, with e_old and e_own the weights in o_t over their sum, and a and w the factors of num_(t-1) and
// v_t in num_t:
// 1. Keep the sums before each chunk.
// 2. From the last chunk to the first, compute its sums and weights anew, keep them, and then go through its
//    tokens backwards, with n and s the gradients of num_t and den_t. In these, m counts as a constant.
//    dv = e_own dy + w n
//    du = e_own dy (v - y), summed over the tokens, and dk = e_own dy (v - y) + w (n v + s)
//    dd = a (n num_(t-1) + s den_(t-1)), summed over the tokens
//    n_(t-1) = a n + e_old dy and s_(t-1) = a s - e_old dy y
// 3. Sum the gradients of d and u over the sequences.

#include "kernels.h"
#include "prefetch.h"
#include "rows.h"
#include "sequences.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int TOKENS = 32;       // tokens of a chunk
constexpr Int CHANNELS = 128;    // channels of a block
constexpr Int SIDE_BY_SIDE = 2;  // vectors that are computed together
constexpr Int LANES = SIDE_BY_SIDE * WIDTH;
constexpr Int ROWS = 3;   // rows of a state: num, den and m
constexpr Int COST = 4;   // multiply-adds that take as long as a token of a channel, roughly
constexpr Int SUMS = 16;  // sums of the gradients of d and u

Int blocks_of(const Wkv& x) { return ceil_div(x.channels, CHANNELS); }

Int threads_of(const Wkv& x) {
    return threads_for((double)all_tokens(x) * (double)(x.channels * COST), x.threads);
}

// From differences x to the weights exp(-max(0, x)) of what is older and exp(min(0, x)) of what is newer.
template <int N>
__attribute__((always_inline)) inline void weigh(const Vec (&x)[N], Vec (&older)[N], Vec (&newer)[N]) {
    Vec e[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) e[j] = (Vec)((BitVec)x[j] | 0x80000000u);  // -|x|
    exp_of_negative(e);
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
        older[j] = select(x[j] > Vec{}, e[j], broadcast(1));
        newer[j] = select(x[j] > Vec{}, broadcast(1), e[j]);
    }
}

// The sums over the tokens so far, times exp(-m - rest), in some lanes.
struct Sums {
    Vec num, den, m, rest;
};

// The weights of sums and of a token that is added to them.
struct Weights {
    Vec older, newer;
};

// Some channels of a sequence. Rows of tokens are used in place if they are floats in whole vectors, without
// padding. Otherwise they are copied to rows of `CHANNELS` floats, which are 0 beyond the problem's channels.
class Block {
  public:
    Block(const Wkv& x, const Place& s, Int index, Workspace& memory)
        : channel(index * CHANNELS),
          channels(min(CHANNELS, x.channels - channel)),
          state(memory.zeros(SIZE)),
          x_(x),
          s_(s),
          in_place_(x.type == FLOAT32 && channels % LANES == 0 && !x.padding),
          decays_(memory.zeros(CHANNELS)),
          bonuses_(memory.zeros(CHANNELS)),
          copied_keys_(memory.zeros(copied())),
          copied_values_(memory.zeros(copied())) {}

    // The number of floats of an array for copies of the rows of a chunk.
    Int copied() const { return in_place_ ? 0 : min(TOKENS, s_.length) * CHANNELS; }

    void begin() {
        read_row(FLOAT32, x_.log_decay + channel, channels, decays_);
        read_row(FLOAT32, x_.bonus + channel, channels, bonuses_);
        for (Int i = 0; i < ROWS; ++i) read_state(x_.state, i, state + i * CHANNELS);
        std::memset(state + ROWS * CHANNELS, 0, CHANNELS * 4);
    }
    void read_state(const float* from, Int i, float* to) const {
        read_row(FLOAT32, from + (s_.index * ROWS + i) * x_.channels + channel, channels, to);
    }
    void write_state(const float* from, Int i, float* to) const {
        write_row(FLOAT32, from, channels, to + (s_.index * ROWS + i) * x_.channels + channel);
    }
    // The factor of sums times exp(-m - rest) that makes them those times exp(-m).
    Vec scale(Int lane) const { return exp_of_negative(load(state + ROWS * CHANNELS + lane)); }

    // Begins a chunk at token `first` of the sequence, and returns how many of its tokens count.
    Int read(Int first) {
        first_ = first, end_ = min(first + TOKENS, s_.length);
        keys_ = rows(x_.k, copied_keys_), values_ = rows(x_.v, copied_values_);
        Int n = 0;
        for (Int t = first_; t < end_; ++t) n += !padded(t);
        return n;
    }
    // The rows of the tokens of the chunk that count, of a tensor to read or of a contiguous one to write.
    // Rows that are not written in place are written to `copies`, and then by `write`.
    Rows rows(const Tensor& tensor, float* copies) const {
        if (in_place_) return {(float*)at(tensor, first_), tensor.token};
        float* to = copies;
        for (Int t = first_; t < end_; ++t)
            if (!padded(t)) read_row(x_.type, at(tensor, t), channels, to), to += CHANNELS;
        return {copies, CHANNELS};
    }
    Rows rows(void* result, float* copies) const {
        return in_place_ ? Rows{(float*)at(result, first_), x_.channels} : Rows{copies, CHANNELS};
    }
    // Writes copies of rows, and zeros at padding.
    void write(Rows from, void* result) const {
        for (Int t = first_; t < end_ && !in_place_; ++t) {
            if (padded(t)) std::memset(at(result, t), 0, (size_t)(channels * size_of(x_.type)));
            else write_row(x_.type, from.data, channels, at(result, t)), from.data += CHANNELS;
        }
    }
    // Lets `advance` request the chunk at `first`, if there is one, of the inputs and of `d_o`.
    void expect(Int first, const Tensor* d_o = nullptr) {
        prefetcher_.clear();
        if (first < 0 || first >= s_.length) return;
        const Int n = min(TOKENS, s_.length - first), size = size_of(x_.type);
        const auto add = [&](const Tensor& tensor) {
            prefetcher_.add(at(tensor, first), tensor.token * size, n, channels * size);
        };
        if (d_o) add(*d_o);
        add(x_.v);
        add(x_.k);
        prefetcher_.spread_over(ceil_div(channels, LANES) * (end_ - first_));
    }

    // Moves the sums of some lanes past n tokens. With AVERAGES, calls `f(i, j, v, sums, own, next)` for the
    // value v of each token i and vector j: with the sums before the token, and the weights in its average
    // and in the next sums.
    template <bool AVERAGES, typename F>
    void advance(Int n, Int lane, F&& f) {
        constexpr int N = SIDE_BY_SIDE;
        const Rows keys = keys_, values = values_;
        Sums sums[N];
        Vec d[N], u[N];
        for (int j = 0; j < N; ++j) {
            const float* const from = state + lane + j * WIDTH;
            sums[j] = {load(from), load(from + CHANNELS), load(from + 2 * CHANNELS),
                       load(from + 3 * CHANNELS)};
            d[j] = load(decays_ + lane + j * WIDTH), u[j] = load(bonuses_ + lane + j * WIDTH);
        }
        for (Int i = 0; i < n; ++i) {
            prefetcher_.issue();
            Vec x[AVERAGES ? 2 * N : N], older[AVERAGES ? 2 * N : N], newer[AVERAGES ? 2 * N : N];
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) {
                Vec &m = sums[j].m, &rest = sums[j].rest;
                const Vec k = load(row(keys, i) + lane + j * WIDTH), step = d[j] + rest, decayed = m + step;
                const Vec lost = (m - decayed) + step;
                if constexpr (AVERAGES) x[N + j] = (k - m) + (u[j] - rest);
                x[j] = (k - decayed) - lost;
                m = select(x[j] > Vec{}, k, decayed), rest = select(x[j] > Vec{}, Vec{}, lost);
            }
            weigh(x, older, newer);
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) {
                const Vec v = load(row(values, i) + lane + j * WIDTH);
                const Weights next = {older[j], newer[j]};
                if constexpr (AVERAGES) f(i, j, v, sums[j], Weights{older[N + j], newer[N + j]}, next);
                sums[j].num = sums[j].num * next.older + next.newer * v;
                sums[j].den = sums[j].den * next.older + next.newer;
            }
        }
        for (int j = 0; j < N; ++j) {
            float* const to = state + lane + j * WIDTH;
            store(to, sums[j].num), store(to + CHANNELS, sums[j].den);
            store(to + 2 * CHANNELS, sums[j].m), store(to + 3 * CHANNELS, sums[j].rest);
        }
    }

    static constexpr Int SIZE = (ROWS + 1) * CHANNELS;  // floats of a state
    const Int channel, channels;
    float* const state;  // rows num, den, m and rest

  private:
    Int token(Int t) const { return s_.batch * x_.tokens + s_.first + t; }
    bool padded(Int t) const { return x_.padding && x_.padding[token(t)]; }
    const char* at(const Tensor& tensor, Int t) const {
        return address(tensor, x_.type, s_.batch, s_.first + t, 0) + channel * size_of(x_.type);
    }
    char* at(void* result, Int t) const {
        return (char*)result + (token(t) * x_.channels + channel) * size_of(x_.type);
    }

    const Wkv& x_;
    const Place s_;
    const bool in_place_;
    float *const decays_, *const bonuses_, *const copied_keys_, *const copied_values_;
    Rows keys_{}, values_{};
    Int first_ = 0, end_ = 0;
    Prefetcher prefetcher_;
};

Status forward(const Wkv& x, const WkvOutputs& out, const Place& s, Int index) {
    Workspace memory;
    Block block(x, s, index, memory);
    float* const copies = memory.floats(block.copied());
    if (memory.failed()) return OUT_OF_MEMORY;
    block.begin();
    for (Int t = 0; t < s.length; t += TOKENS) {
        const Int n = block.read(t);
        block.expect(t + TOKENS);
        const Rows o = block.rows(out.o, copies);
        for (Int lane = 0; lane < block.channels; lane += LANES)
            block.advance<true>(n, lane,
                                [&](Int i, int j, Vec v, const Sums& sums, Weights own, Weights)
                                    __attribute__((always_inline)) {
                                        const Vec total = own.older * sums.den + own.newer;
                                        store(row(o, i) + lane + j * WIDTH,
                                              (own.older * sums.num + own.newer * v) / total);
                                    });
        block.write(o, out.o);
    }
    for (Int lane = 0; lane < block.channels; lane += WIDTH)
        for (Int i = 0; i < 2; ++i) {
            float* const sum = block.state + i * CHANNELS + lane;
            store(sum, load(sum) * block.scale(lane));
        }
    for (Int i = 0; i < ROWS; ++i) block.write_state(block.state + i * CHANNELS, i, out.state);
    return SUCCESS;
}

// The gradients of a block of channels of a sequence.
class BlockGradients {
  public:
    BlockGradients(const Wkv& x, const WkvGradients& out, const Place& s, Int index, Workspace& memory)
        : out_(out),
          s_(s),
          block_(x, s, index, memory),
          kept_(memory.floats(ceil_div(s.length, TOKENS) * Block::SIZE)),
          d_state_(memory.zeros(ROWS * CHANNELS)),
          d_decays_(memory.zeros(CHANNELS)),
          d_bonuses_(memory.zeros(CHANNELS)),
          d_o_(memory.zeros(block_.copied())),
          d_k_(memory.floats(block_.copied())),
          d_v_(memory.floats(block_.copied())),
          saved_(memory.floats(TOKENS * COUNT * LANES)) {}

    // Adds to the rows d_log_decay and d_bonus of all channels.
    void run(float* d_log_decay, float* d_bonus) {
        block_.begin();
        // 1. The sums before the chunks.
        for (Int t = 0; t < s_.length; t += TOKENS) {
            std::memcpy(kept(t), block_.state, (size_t)Block::SIZE * 4);
            const Int n = block_.read(t);
            block_.expect(t + TOKENS);
            for (Int lane = 0; lane < block_.channels; lane += LANES) block_.advance<false>(n, lane, nullptr);
        }
        // 2. The gradients, backwards.
        for (Int i = 0; i < 2; ++i) {
            float* const row = d_state_ + i * CHANNELS;
            block_.read_state(out_.state, i, row);
            for (Int lane = 0; lane < block_.channels; lane += WIDTH)
                store(row + lane, load(row + lane) * block_.scale(lane));
        }
        for (Int t = (ceil_div(s_.length, TOKENS) - 1) * TOKENS; t >= 0; t -= TOKENS) chunk(t);
        for (Int i = 0; i < ROWS; ++i) block_.write_state(d_state_ + i * CHANNELS, i, out_.d_state);
        for (Int i = 0; i < block_.channels; ++i) {
            d_log_decay[block_.channel + i] += d_decays_[i];
            d_bonus[block_.channel + i] += d_bonuses_[i];
        }
    }

  private:
    float* kept(Int t) const { return kept_ + t / TOKENS * Block::SIZE; }

    void chunk(Int t) {
        const Int n = block_.read(t);
        const Rows d_o = block_.rows(out_.o, d_o_);
        const Rows d_k = block_.rows(out_.d_k, d_k_), d_v = block_.rows(out_.d_v, d_v_);
        block_.expect(t - TOKENS, &out_.o);
        std::memcpy(block_.state, kept(t), (size_t)Block::SIZE * 4);
        for (Int lane = 0; lane < block_.channels; lane += LANES) {
            replay(n, lane, d_o, d_k, d_v);
            for (int j = 0; j < SIDE_BY_SIDE; ++j) reverse(n, lane + j * WIDTH, saved_ + j * WIDTH, d_k, d_v);
        }
        block_.write(d_k, out_.d_k);
        block_.write(d_v, out_.d_v);
    }

    // The sums and weights of a chunk, and the gradients by way of what the average has of its own token.
    void replay(Int n, Int lane, Rows d_o, Rows d_k, Rows d_v) {
        float* const saved = saved_;
        Vec d_u[SIDE_BY_SIDE] = {};
        block_.advance<true>(n, lane,
                             [&](Int i, int j, Vec v, const Sums& sums, Weights own,
                                 Weights next) __attribute__((always_inline)) {
                                 const Int at = lane + j * WIDTH;
                                 const Vec share = broadcast(1) / (own.older * sums.den + own.newer);
                                 const Vec y = (own.older * sums.num + own.newer * v) * share;
                                 const Vec d_y = load(row(d_o, i) + at) * share, by_own = own.newer * d_y;
                                 const Vec through = by_own * (v - y), d_num = own.older * d_y;
                                 store(row(d_v, i) + at, by_own), store(row(d_k, i) + at, through);
                                 d_u[j] += through;
                                 float* const to = saved + i * COUNT * LANES + j * WIDTH;
                                 store(to + NUM * LANES, sums.num), store(to + DEN * LANES, sums.den);
                                 store(to + OLDER * LANES, next.older), store(to + NEWER * LANES, next.newer);
                                 store(to + D_NUM * LANES, d_num), store(to + D_DEN * LANES, d_num * y);
                                 store(to + VALUE * LANES, v);
                             });
        for (int j = 0; j < SIDE_BY_SIDE; ++j) add_to(d_bonuses_ + lane + j * WIDTH, d_u[j]);
    }

    // The gradients of a chunk by way of the sums after each token, in one vector.
    void reverse(Int n, Int lane, const float* saved, Rows d_k, Rows d_v) {
        Vec d_num = load(d_state_ + lane), d_den = load(d_state_ + CHANNELS + lane), d_decay{};
        for (Int i = n - 1; i >= 0; --i) {
            const float* const of = saved + i * COUNT * LANES;
            const Vec older = load(of + OLDER * LANES), newer = load(of + NEWER * LANES);
            add_to(row(d_v, i) + lane, newer * d_num);
            add_to(row(d_k, i) + lane, newer * (d_num * load(of + VALUE * LANES) + d_den));
            d_num *= older, d_den *= older;
            d_decay += d_num * load(of + NUM * LANES) + d_den * load(of + DEN * LANES);
            d_num += load(of + D_NUM * LANES), d_den -= load(of + D_DEN * LANES);
        }
        store(d_state_ + lane, d_num), store(d_state_ + CHANNELS + lane, d_den);
        add_to(d_decays_ + lane, d_decay);
    }

    static void add_to(float* at, Vec x) { store(at, load(at) + x); }

    // What is kept of each token of a chunk, in some lanes: the sums before it, the weights in those after
    // it, the gradients of the former by way of its average, that of den negated, and its value.
    enum Saved { NUM, DEN, OLDER, NEWER, D_NUM, D_DEN, VALUE, COUNT };

    const WkvGradients& out_;
    const Place s_;
    Block block_;
    float *const kept_, *const d_state_, *const d_decays_, *const d_bonuses_, *const d_o_, *const d_k_;
    float *const d_v_, *const saved_;
};

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(wkv_forward)(const Wkv* x, const WkvOutputs* out) {
    advise_huge_pages(*x, out->o, x->tokens, 1, x->channels);
    const Int blocks = blocks_of(*x);
    return parallel_for(x->sequences * blocks, threads_of(*x), [&](Int i) {
        const FlushSubnormals flush(true);
        return forward(*x, *out, place_of(*x, i / blocks), i % blocks);
    });
}

Status EXPORTED(wkv_backward)(const Wkv* x, const WkvGradients* out) {
    advise_huge_pages(*x, out->d_k, x->tokens, 1, x->channels);
    advise_huge_pages(*x, out->d_v, x->tokens, 1, x->channels);
    const Int blocks = blocks_of(*x), n = x->channels, sums = min(x->sequences, SUMS);
    Workspace memory;
    float *const d_decays = memory.zeros(sums * n), *const d_bonuses = memory.zeros(sums * n);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Status status = parallel_for(sums * blocks, threads_of(*x), [&](Int i) {
        const FlushSubnormals flush(true);
        const Int sum = i / blocks, index = i % blocks;
        for (Int sequence = sum; sequence < x->sequences; sequence += sums) {
            Workspace own;
            BlockGradients block(*x, *out, place_of(*x, sequence), index, own);
            if (own.failed()) return OUT_OF_MEMORY;
            block.run(d_decays + sum * n, d_bonuses + sum * n);
        }
        return SUCCESS;
    });
    if (status != SUCCESS) return status;
    // 3. The sums.
    for (Int c = 0; c < n; ++c) {
        out->d_log_decay[c] = out->d_bonus[c] = 0;
        for (Int i = 0; i < sums; ++i) {
            out->d_log_decay[c] += d_decays[i * n + c];
            out->d_bonus[c] += d_bonuses[i * n + c];
        }
    }
    return SUCCESS;
}
