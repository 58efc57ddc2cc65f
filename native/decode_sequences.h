// The instructions of a program that read and update the state of a sequence, for tokens in order. Threads
// share them by heads or by channels.
//
// CONVOLVE: to_c = sum_l weights[l, c] x_c(t - l) for n channels c of `first` and `window` taps. State: the
// last inputs [window - 1, n], the latest last.
//
// RECUR: S <- diag(a) S + k v^T, then o = scale S^T q, for each of `groups` states [features, values] and the
// `heads` / `groups` query heads that read it; a as `kind` says; q, k, v at `first`, `second`, `third`. With
// `rates` b it is the delta rule: v becomes b (v - S^T diag(a) k). With `divisor_k` z <- diag(a) z + that
// key, and o is divided by its product d with `divisor_q`; z [groups, features] lies behind the states S.
// GATE_OF_AVERAGE: one gate a for each group, whose keys, and those of the divisor, are multiplied by `rates`
// 1 - a; behind z lie the sums of their factors w <- a w + 1 - a, [groups]. With an epsilon above 0, d is
// replaced by sign(d) max(|d|, epsilon w), where w is 1 for all other gates.
//
// ATTEND: o = sum_j softmax_j(scale q . k_j) v_j over the last `window` tokens; with a window of 0, over all
// tokens. State: keys [groups, slots / 16, features, 16], then values [groups, slots, values], with a slot
// for each token of the window, filled up to a multiple of 16. The token at position p is in slot p % window;
// without a window it is in slot p of the cache.
//
// Queries have `queries` heads, keys `keys` heads, whose numbers divide `heads` and `groups`.
#pragma once

#include "decode_tokens.h"

namespace UNROLLED_ISA {

// Keys lie together in blocks, so that lanes hold keys and no product is summed across lanes.
constexpr Int KEY_BLOCK = 16;
constexpr Int QUERIES = 16;  // that attend side by side

inline Int round_up_keys(Int n) { return ceil_div(n, KEY_BLOCK) * KEY_BLOCK; }

// A token, and the states of its sequence.
struct SequenceRow {
    TokenRow row;
    float *state, *cache;
    Int capacity;  // tokens in the cache
};

// A share of the work: from `first` to `last`.
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

// Updates `VECS` vectors of the values of one state from `value`, and returns their product with the first
// query.
template <int VECS>
void update_state(const Instruction& x, float* state, Int left, GateRow a, const float* key,
                  const float* value, const float* rate, const float* query, Vec* o) {
    const Int M = x.values;
    Vec v[VECS], totals[VECS] = {};
    for (int j = 0; j < VECS; ++j) v[j] = load_first(value + j * WIDTH, left - j * WIDTH);
    if (x.kind == GATE_OF_AVERAGE)
        for (int j = 0; j < VECS; ++j) v[j] *= broadcast(*rate);
    else if (rate) {
        Vec held[VECS] = {};
        for (Int r = 0; r < x.features; ++r)
            for (int j = 0; j < VECS; ++j)
                held[j] += load_first(state + r * M + j * WIDTH, left - j * WIDTH) *
                           broadcast(a.gates[r * a.step] * key[r]);
        for (int j = 0; j < VECS; ++j) v[j] = (v[j] - held[j]) * broadcast(*rate);
    }
    for (Int r = 0; r < x.features; ++r) {
        const Vec k = broadcast(key[r]), q = broadcast(query[r]), gate = broadcast(a.gates[r * a.step]);
        for (int j = 0; j < VECS; ++j) {
            float* at = state + r * M + j * WIDTH;
            const Vec s = load_first(at, left - j * WIDTH) * gate + v[j] * k;
            store_first(at, left - j * WIDTH, s);
            totals[j] += s * q;
        }
    }
    for (int j = 0; j < VECS; ++j) o[j] = totals[j];
}

inline void recur(const Instruction& x, const SequenceRow& s, Int group) {
    const TokenRow& t = s.row;
    const Int R = x.features, M = x.values, P = x.heads / x.groups;
    float *state = s.state + x.state + group * R * M, *z = s.state + x.state + x.groups * R * M + group * R;
    const Int key_head = group * x.keys / x.groups;
    const float *key = t.at + x.second + key_head * R, *value = t.at + x.third + group * M;
    const float* rate = x.rates < 0 ? nullptr : t.at + x.rates + group;
    const GateRow a = gates_of(x, t, group);
    const auto query = [&](Int p, Int place) {
        return t.at + place + (group * P + p) * x.queries / x.heads * R;
    };
    constexpr int VECS = 4;
    for (Int m = 0; m < M; m += VECS * WIDTH) {
        const Int left = M - m;
        Vec o[VECS];
        const float* q = query(0, x.first);
        if (left > 3 * WIDTH) update_state<4>(x, state + m, left, a, key, value + m, rate, q, o);
        else if (left > 2 * WIDTH) update_state<3>(x, state + m, left, a, key, value + m, rate, q, o);
        else if (left > WIDTH) update_state<2>(x, state + m, left, a, key, value + m, rate, q, o);
        else update_state<1>(x, state + m, left, a, key, value + m, rate, q, o);
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
    for (Int r = 0; r < R; ++r) z[r] = z[r] * a.gates[r * a.step] + own[r] * share;
    for (Int p = 0; p < P; ++p) {
        const float* q = query(p, x.divisor_q);
        float divisor = 0;
        for (Int r = 0; r < R; ++r) divisor += q[r] * z[r];
        if (__builtin_fabsf(divisor) < x.epsilon * weight)
            divisor = __builtin_copysignf(x.epsilon * weight, divisor);
        float* o = t.to(x) + (group * P + p) * M;
        const float factor = divisible(divisor) ? 1 / divisor : 0;
        for (Int m = 0; m < M; m += WIDTH)
            store_first(o + m, M - m,
                        divisible(divisor) ? load_first(o + m, M - m) * broadcast(factor) : Vec{});
    }
}

// scores_j = scale q . k_j for n keys in blocks [D, KEY_BLOCK], up to whole blocks.
inline void score(const float* q, const float* keys, Int n, Int D, float scale, float* scores) {
    constexpr int VECS = KEY_BLOCK / WIDTH;
    for (Int j = 0; j < n; j += KEY_BLOCK, keys += D * KEY_BLOCK) {
        Vec even[VECS] = {}, odd[VECS] = {};
        for (Int d = 0; d + 2 <= D; d += 2)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) {
                even[v] += load(keys + d * KEY_BLOCK + v * WIDTH) * broadcast(q[d]);
                odd[v] += load(keys + (d + 1) * KEY_BLOCK + v * WIDTH) * broadcast(q[d + 1]);
            }
        for (int v = 0; v < VECS; ++v) {
            if (D % 2) even[v] += load(keys + (D - 1) * KEY_BLOCK + v * WIDTH) * broadcast(q[D - 1]);
            store(scores + j + v * WIDTH, (even[v] + odd[v]) * broadcast(scale));
        }
    }
}

// Adds to o `VECS` vectors of factor sum_j weights_j v_j for n values in rows of M floats. Four sums take
// turns, since each waits for its last addition.
template <int VECS>
void weigh(const float* weights, const float* values, Int n, Int M, Int left, float factor, float* o) {
    Vec sums[4][VECS] = {};
    const auto add = [&](Int j, int turn) __attribute__((always_inline)) {
        for (int v = 0; v < VECS; ++v)
            sums[turn][v] += load_first(values + j * M + v * WIDTH, left - v * WIDTH) * broadcast(weights[j]);
    };
    Int j = 0;
    for (; j + 4 <= n; j += 4) add(j, 0), add(j + 1, 1), add(j + 2, 2), add(j + 3, 3);
    for (; j < n; ++j) add(j, 0);
    for (int v = 0; v < VECS; ++v) {
        const Vec total = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
        const Int lanes = left - v * WIDTH;
        store_first(o + v * WIDTH, lanes, load_first(o + v * WIDTH, lanes) + total * broadcast(factor));
    }
}

// The keys and values of one head.
struct KeyStore {
    float *keys, *values;
    Int D, M;

    KeyStore(const Instruction& x, const SequenceRow& s, Int group) : D(x.features), M(x.values) {
        const Int slots = x.window ? round_up_keys(x.window) : s.capacity;
        float* all = x.window ? s.state + x.state : s.cache + x.state * s.capacity;
        keys = all + group * slots * D;
        values = all + x.groups * slots * D + group * slots * M;
    }

    void write(Int slot, const float* key, const float* value) {
        float* to = keys + slot / KEY_BLOCK * KEY_BLOCK * D + slot % KEY_BLOCK;
        for (Int d = 0; d < D; ++d) to[d * KEY_BLOCK] = key[d];
        std::memcpy(values + slot * M, value, (size_t)M * 4);
    }
};

// A few queries of one head attend to the keys of their sequence. `counts` says to how many, `scores` has a
// row of `longest` numbers for each. All queries meet a part of the keys and values while it is in the cache.
inline void attend_from(const KeyStore& store, const float* const* queries, float* const* outputs,
                        const Int* counts, Int n, float scale, float* scores, Int longest) {
    constexpr Int PART = 256;
    const Int D = store.D, M = store.M, most = counts[n - 1];
    float totals[QUERIES];
    for (Int k = 0; k < most; k += PART)
        for (Int i = 0; i < n; ++i)
            if (counts[i] > k)
                score(queries[i], store.keys + k * D, min(PART, counts[i] - k), D, scale,
                      scores + i * longest + k);
    for (Int i = 0; i < n; ++i) {
        float* row = scores + i * longest;
        totals[i] = exponentials(row, counts[i], most_of(row, counts[i]), row);
        std::memset(outputs[i], 0, (size_t)M * 4);
    }
    for (Int k = 0; k < most; k += PART)
        for (Int i = 0; i < n; ++i)
            for (Int m = 0; m < M && counts[i] > k; m += 2 * WIDTH) {
                const float *weights = scores + i * longest + k, *values = store.values + k * M + m;
                const Int count = min(PART, counts[i] - k);
                if (M - m > WIDTH) weigh<2>(weights, values, count, M, M - m, 1 / totals[i], outputs[i] + m);
                else weigh<1>(weights, values, count, M, M - m, 1 / totals[i], outputs[i] + m);
            }
}

// `n` consecutive tokens of a sequence; with a window, one.
inline void attend(const Instruction& x, const SequenceRow* s, Int n, Int group, float* scores, Int longest) {
    KeyStore store(x, s[0], group);
    const Int D = x.features, M = x.values, P = x.heads / x.groups;
    Int counts[QUERIES];
    for (Int i = 0; i < n; ++i) {
        const TokenRow& t = s[i].row;
        store.write(x.window ? t.position % x.window : t.position, t.at + x.second + group * D,
                    t.at + x.third + group * M);
        counts[i] = x.window ? min(t.position + 1, x.window) : t.position + 1;
    }
    for (Int head = group * P; head < (group + 1) * P; ++head) {
        const float* queries[QUERIES];
        float* outputs[QUERIES];
        for (Int i = 0; i < n; ++i) {
            queries[i] = s[i].row.from(x) + head * D;
            outputs[i] = s[i].row.to(x) + head * M;
        }
        attend_from(store, queries, outputs, counts, n, x.scale, scores, longest);
    }
}

}  // namespace UNROLLED_ISA
