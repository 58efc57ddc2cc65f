// The instructions of a program that read and update the state of a sequence, for tokens in order. Threads
// share them by heads or by channels.
//
// CONVOLVE: to_c = sum_l weights[l, c] x_c(t - l) for n channels c of `first` and `window` taps. State: the
// last inputs [window - 1, n], the latest last.
//
// AVERAGE: o = (num + exp(k + u) v) / (den + exp(k + u)); then num <- exp(d) num + exp(k) v, and den <-
// exp(d) den + exp(k). It has n channels, with k at `first`, v at `second`, d in `weights` and u in `bias`.
// State: num / exp(m), den / exp(m) and m, [n] each, where m is the largest exponent so far, decayed by d per
// token.
//
// SCAN: h <- exp(d a) h + d x b, then y = sum h c over the `features` states of each of n channels. x is at
// `first`, d at `second`, b at `third`, c at `reader`. State: h [features, n]; `weights`: a [features, n].
//
// RECUR: S <- diag(a) S + k v^T, then o = scale S^T q, for each of `groups` states [features, values] and the
// `heads` / `groups` query heads that read it. The gates a are those of the `kind`; q, k, v are at `first`,
// `second`, `third`. With `rates` b it is the delta rule: v becomes b (v - S^T diag(a) k). With a `reader` p
// and a `writer` e, [groups, features] each, it is the rule of RWKV-7: S <- diag(a) S - e p^T S + k v^T. With
// `divisor_k`, z <- diag(a) z + divisor_k, and o is divided by d = divisor_q . z; z [groups, features] lies
// behind the states S. GATE_OF_AVERAGE: one gate a for each group. The keys, and those of the divisor, are
// multiplied by `rates`, which are 1 - a; behind z lie the sums of these factors, w <- a w + 1 - a, [groups].
// With an epsilon above 0, d is replaced by sign(d) max(|d|, epsilon w), where w is 1 for all other gates.
//
// ATTEND: o = sum_j softmax_j(scale q . k_j) v_j over the last `window` tokens; with a window of 0, over all
// tokens. State: keys [groups, slots / 16, features, 16], then values [groups, slots, values], with a slot
// for each token of the window, padded to a multiple of 16. The token at position p is in slot p % window;
// without a window it is in slot p of the cache.
//
// There are `queries` heads of queries, which divide `heads`, and `keys` heads of keys, which divide
// `groups`.
#pragma once

#include "attention.h"
#include "decode_tokens.h"

namespace UNROLLED_ISA {

// A token, and the states of its sequence.
struct SequenceRow {
    TokenRow row;
    float *state, *cache;
    Int capacity;  // tokens in the cache
};

// A share of the work: [first, last).
struct Share {
    Int first, last;
};

inline Share share_of(Int n, Int part, Int parts) { return {n * part / parts, n * (part + 1) / parts}; }

inline void convolve(const Instruction& x, const SequenceRow& s, Share channels) {
    float* past = s.state + x.state;
    for (Int c = channels.first; c < channels.last; c += WIDTH) {
        const Int left = channels.last - c;
        const Vec now = load_first(s.row.from(x) + c, left);
        Vec total = now * load_first(x.weights + c, left);
        for (Int l = 1; l < x.window; ++l)
            total += load_first(past + (x.window - 1 - l) * x.n + c, left) *
                     load_first(x.weights + l * x.n + c, left);
        for (Int l = 0; l + 2 < x.window; ++l)
            store_first(past + l * x.n + c, left, load_first(past + (l + 1) * x.n + c, left));
        store_first(past + (x.window - 2) * x.n + c, left, now);
        store_first(s.row.to(x) + c, left, total);
    }
}

constexpr float LOWEST_EXPONENT = -1e30f;  // finite, so that it may be subtracted from itself

inline void average(const Instruction& x, const SequenceRow& s, Share channels) {
    float *nums = s.state + x.state, *dens = nums + x.n, *tops = dens + x.n;
    for (Int c = channels.first; c < channels.last; c += WIDTH) {
        const Int left = channels.last - c;
        const Vec k = load_first(s.row.from(x) + c, left), v = load_first(s.row.at + x.second + c, left);
        const Vec num = load_first(nums + c, left), den = load_first(dens + c, left);
        // A sum of no tokens is 0, and has no largest exponent.
        const Vec m = select(den > Vec{}, load_first(tops + c, left), broadcast(LOWEST_EXPONENT));
        const Vec d = load_first(x.weights + c, left), own = (k - m) + load_first(x.bias + c, left);
        const Vec peak = max(own, Vec{}), top = max(m + d, k);
        // m - top is exact where m + d was rounded, so that the rounding does not change the decay.
        Vec factors[] = {-peak, own - peak, (m - top) + d, k - top};
        exp_of_negative(factors);
        const auto [kept, added, decay, weight] = factors;
        store_first(s.row.to(x) + c, left, (kept * num + added * v) / (kept * den + added));
        store_first(nums + c, left, decay * num + weight * v);
        store_first(dens + c, left, decay * den + weight);
        store_first(tops + c, left, top);
    }
}

inline void scan(const Instruction& x, const SequenceRow& s, Share channels) {
    const float *at = s.row.at, *writers = at + x.third, *readers = at + x.reader;
    for (Int c = channels.first; c < channels.last; c += WIDTH) {
        const Int left = channels.last - c;
        const Vec size = load_first(at + x.second + c, left), in = load_first(s.row.from(x) + c, left);
        Vec total{};
        for (Int k = 0; k < x.features; ++k) {
            float* const h = s.state + x.state + k * x.n + c;
            const Vec decay = exp_of_negative(size * load_first(x.weights + k * x.n + c, left));
            const Vec now = load_first(h, left) * decay + size * in * broadcast(writers[k]);
            store_first(h, left, now);
            total += now * broadcast(readers[k]);
        }
        store_first(s.row.to(x) + c, left, total);
    }
}

// What a state is multiplied by, `gates[r * step]` for feature r.
struct GateRow {
    const float* gates;
    Int step;
};

inline GateRow gates_of(const Instruction& x, const TokenRow& t, Int group) {
    static constexpr float none = 1;
    if (x.kind == NO_GATES) return {&none, 0};
    if (x.kind == CONSTANT_GATES) return {x.weights + group, 0};
    if (x.kind == GATE_PER_HEAD || x.kind == GATE_OF_AVERAGE) return {t.at + x.gates + group, 0};
    return {t.at + x.gates + group * x.features, 1};
}

// What a token does to one state; null for what an instruction does not have.
struct Update {
    const float *key, *query, *rate, *reader, *writer;
};

// Updates `VECS` vectors of the values of one state from `value`, and returns their product with the first
// query.
template <int VECS, bool HAS_READER>
void update_state(const Instruction& x, float* state, Int left, GateRow a, const float* value,
                  const Update& u, Vec* o) {
    const Int M = x.values;
    Vec v[VECS], held[VECS] = {}, totals[VECS] = {};
    for (int j = 0; j < VECS; ++j) v[j] = load_first(value + j * WIDTH, left - j * WIDTH);
    const auto read = [&](auto&& reader) {
        for (Int r = 0; r < x.features; ++r)
            for (int j = 0; j < VECS; ++j)
                held[j] += load_first(state + r * M + j * WIDTH, left - j * WIDTH) * broadcast(reader(r));
    };
    if constexpr (HAS_READER) read([&](Int r) { return u.reader[r]; });
    else if (x.kind == GATE_OF_AVERAGE)
        for (int j = 0; j < VECS; ++j) v[j] *= broadcast(*u.rate);
    else if (u.rate) {
        read([&](Int r) { return a.gates[r * a.step] * u.key[r]; });
        for (int j = 0; j < VECS; ++j) v[j] = (v[j] - held[j]) * broadcast(*u.rate);
    }
    for (Int r = 0; r < x.features; ++r) {
        const Vec k = broadcast(u.key[r]), q = broadcast(u.query[r]), gate = broadcast(a.gates[r * a.step]);
        for (int j = 0; j < VECS; ++j) {
            float* at = state + r * M + j * WIDTH;
            Vec s = load_first(at, left - j * WIDTH) * gate + v[j] * k;
            if constexpr (HAS_READER) s -= held[j] * broadcast(u.writer[r]);
            store_first(at, left - j * WIDTH, s);
            totals[j] += s * q;
        }
    }
    for (int j = 0; j < VECS; ++j) o[j] = totals[j];
}

inline void recur(const Instruction& x, const SequenceRow& s, Int group) {
    const FlushSubnormals flush(x.kind != NO_GATES);
    const TokenRow& t = s.row;
    const Int R = x.features, M = x.values, P = x.heads / x.groups;
    float *state = s.state + x.state + group * R * M, *z = s.state + x.state + x.groups * R * M + group * R;
    const Int key_head = group * x.keys / x.groups;
    const float *key = t.at + x.second + key_head * R, *value = t.at + x.third + group * M;
    const auto at = [&](Int place, Int begin) { return place < 0 ? nullptr : t.at + place + begin; };
    const float* rate = at(x.rates, group);
    const GateRow a = gates_of(x, t, group);
    const auto query = [&](Int p, Int place) {
        return t.at + place + (group * P + p) * x.queries / x.heads * R;
    };
    const Update u{key, query(0, x.first), rate, at(x.reader, group * R), at(x.writer, group * R)};
    constexpr int VECS = 4;
    for (Int m = 0; m < M; m += VECS * WIDTH) {
        const Int left = M - m;
        Vec o[VECS];
        const auto update = [&](auto vecs) {
            constexpr int N = decltype(vecs)::value;
            if (u.reader) update_state<N, true>(x, state + m, left, a, value + m, u, o);
            else update_state<N, false>(x, state + m, left, a, value + m, u, o);
        };
        if (left > 3 * WIDTH) update(Count<4>());
        else if (left > 2 * WIDTH) update(Count<3>());
        else if (left > WIDTH) update(Count<2>());
        else update(Count<1>());
        for (int j = 0; j < VECS && j * WIDTH < left; ++j)
            store_first(t.to(x) + group * P * M + m + j * WIDTH, left - j * WIDTH, o[j] * broadcast(x.scale));
    }
    for (Int p = 1; p < P; ++p)
        for (Int m = 0; m < M; m += WIDTH) {
            Vec o{};
            const float* q = query(p, x.first);
            for (Int r = 0; r < R; ++r) o += load_first(state + r * M + m, M - m) * broadcast(q[r]);
            store_first(t.to(x) + (group * P + p) * M + m, M - m, o * broadcast(x.scale));
        }
    if (x.divisor_k < 0) return;
    const float* own = t.at + x.divisor_k + key_head * R;
    float share = 1, weight = 1;
    if (x.kind == GATE_OF_AVERAGE) {
        float& total = s.state[x.state + x.groups * R * (M + 1) + group];
        share = *rate, weight = total = total * *a.gates + share;
    }
    for (Int r = 0; r < R; r += WIDTH) {
        const Int left = R - r;
        const Vec gate = a.step ? load_first(a.gates + r, left) : broadcast(*a.gates);
        store_first(z + r, left,
                    load_first(z + r, left) * gate + load_first(own + r, left) * broadcast(share));
    }
    for (Int p = 0; p < P; ++p) {
        const float* q = query(p, x.divisor_q);
        Vec products{};
        for (Int r = 0; r < R; r += WIDTH) products += load_first(q + r, R - r) * load_first(z + r, R - r);
        float divisor = sum(products);
        if (__builtin_fabsf(divisor) < x.epsilon * weight)
            divisor = __builtin_copysignf(x.epsilon * weight, divisor);
        float* o = t.to(x) + (group * P + p) * M;
        const float factor = divisible(divisor) ? 1 / divisor : 0;
        for (Int m = 0; m < M; m += WIDTH)
            store_first(o + m, M - m,
                        divisible(divisor) ? load_first(o + m, M - m) * broadcast(factor) : Vec{});
    }
}

// The keys and values of one head.
inline KeyStore key_store(const Instruction& x, const SequenceRow& s, Int group) {
    const Int slots = x.window ? round_up_keys(x.window) : s.capacity, D = x.features, M = x.values;
    float* all = x.window ? s.state + x.state : s.cache + x.state * s.capacity;
    return {all + group * slots * D, all + x.groups * slots * D + group * slots * M, D, M};
}

// `n` consecutive tokens of a sequence; with a window, one.
inline void attend(const Instruction& x, const SequenceRow* s, Int n, Int group) {
    const KeyStore store = key_store(x, s[0], group);
    const Int D = x.features, M = x.values, P = x.heads / x.groups;
    for (Int i = 0; i < n; ++i) {
        const TokenRow& t = s[i].row;
        store.write(x.window ? t.position % x.window : t.position, t.at + x.second + group * D,
                    t.at + x.third + group * M);
    }
    const TokenRow& first = s[0].row;
    const Int row = n > 1 ? s[1].row.at - first.at : 0,
              count = x.window ? min(first.position + 1, x.window) : first.position + 1;
    for (Int head = group * P; head < (group + 1) * P; ++head)
        attend_to(store, {first.from(x) + head * D, first.to(x) + head * M, row, count}, n, x.scale);
}

}  // namespace UNROLLED_ISA
