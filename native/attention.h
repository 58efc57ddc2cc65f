// Queries of one head attend to the keys and values of their sequence: o = sum_j softmax_j(scale q . k_j)
// v_j.
//
// Keys and values are processed in parts that stay in the first-level cache for all queries. A query keeps
// its largest score so far, and sums relative to it. A larger score scales these sums down (Milakov and
// Gimelshein 2018, arXiv 1805.02867, algorithm 3).
#pragma once

#include "decode_tokens.h"
#include "product.h"

namespace UNROLLED_ISA {

// Keys lie together in blocks, so that lanes hold keys and no product is summed across lanes.
constexpr Int KEY_BLOCK = 16;
constexpr Int QUERIES = 64;  // queries that attend side by side
constexpr Int PART = 128;    // keys at a time

inline Int round_up_keys(Int n) { return ceil_div(n, KEY_BLOCK) * KEY_BLOCK; }

// The keys [slots / KEY_BLOCK, D, KEY_BLOCK] and values [slots, M] of one head.
struct KeyStore {
    float *keys, *values;
    Int D, M;

    void write(Int slot, const float* key, const float* value) const {
        float* to = keys + slot / KEY_BLOCK * KEY_BLOCK * D + slot % KEY_BLOCK;
        for (Int d = 0; d < D; ++d) to[d * KEY_BLOCK] = key[d];
        std::memcpy(values + slot * M, value, (size_t)M * 4);
    }
};

// Queries and outputs of one head for consecutive tokens, `row` floats apart. The first query attends to
// `count` keys, each further query to one key more.
struct Queries {
    const float* q;
    float* o;
    Int row, count;

    Queries from(Int i) const { return {q + i * row, o + i * row, row, count + i}; }
};

// The sum of exp(score - most) for a query, by lanes.
struct Weights {
    float most = -__FLT_MAX__;  // of the scores so far
    Vec total = {};
};

// Scores of `ROWS` queries and the keys of `VECS` vectors, the first of which begins at `keys`.
// Not inlined, so that the tile has all registers.
template <int ROWS, int VECS>
__attribute__((noinline)) void score(const Queries& x, const float* keys, Int D, float scale, float* scores) {
    Vec sums[ROWS][VECS] = {};
    for (Int d = 0; d < D; ++d) {
        Vec right[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v)
            right[v] = load(keys + (v * WIDTH / KEY_BLOCK * D + d) * KEY_BLOCK + v * WIDTH % KEY_BLOCK);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const Vec left = broadcast(x.q[r * x.row + d]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) sums[r][v] += left * right[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store(scores + r * PART + v * WIDTH, sums[r][v] * broadcast(scale));
}

// The same for the keys of the slots from `first` on, up to whole blocks.
template <int ROWS>
inline void score_part(const Queries& x, const KeyStore& store, Int first, Int n, float scale,
                       float* scores) {
    constexpr Int WIDE = TILE_VECS * WIDTH, NARROW = min(WIDE, KEY_BLOCK);
    const Int D = store.D, end = round_up_keys(n);
    const auto keys = [&](Int j) {
        return store.keys + (first + j) / KEY_BLOCK * KEY_BLOCK * D + j % KEY_BLOCK;
    };
    Int j = 0;
    for (; j + WIDE <= end; j += WIDE) score<ROWS, TILE_VECS>(x, keys(j), D, scale, scores + j);
    for (; j < end; j += NARROW) score<ROWS, NARROW / WIDTH>(x, keys(j), D, scale, scores + j);
}

// Replaces n scores by exp(score - most). Returns the factor that the sums so far are multiplied by.
inline float weigh(Weights& x, float* scores, Int n) {
    for (Int i = n; i % WIDTH; ++i) scores[i] = -__builtin_inff();
    Vec top = broadcast(x.most);
    for (Int i = 0; i < n; i += WIDTH) top = max(load(scores + i), top);
    const float most = largest_lane(top);
    float factor = 1;
    if (most > x.most) {
        factor = exp_of_negative(broadcast(x.most - most))[0];
        x.most = most;
        x.total *= broadcast(factor);
    }
    for (Int i = 0; i < n; i += WIDTH) {
        const Vec weight = exp_of_negative(load(scores + i) - broadcast(most));
        store(scores + i, weight);
        x.total += weight;
    }
    return factor;
}

// `ROWS` queries attend to the part of the keys and values that begins at slot `first`, each to one key of it
// or more. A query's keys are summed in the same order whichever queries are beside it.
template <int ROWS>
void attend_to_part(const Queries& x, const KeyStore& store, Int first, float scale, Weights* weights) {
    alignas(64) float scores[ROWS * PART];
    float factors[ROWS];
    Int counts[ROWS];
    score_part<ROWS>(x, store, first, min(PART, x.count + ROWS - 1 - first), scale, scores);
    for (int r = 0; r < ROWS; ++r) {
        counts[r] = min(PART, x.count + r - first);
        factors[r] = weigh(weights[r], scores + r * PART, counts[r]);
    }
    const Int M = store.M, whole = M / WIDTH * WIDTH;
    const float* values = store.values + first * M;
    for (Int m = 0; m < whole; m += TILE_VECS * WIDTH)
        with_tile_of<ROWS>(min(whole - m, TILE_VECS * WIDTH) / WIDTH,
                           [&](auto tile) __attribute__((always_inline)) {
                               tile.add_product({scores, PART, 1}, values + m, M, counts[0]);
                               tile.add_rest_of_product({scores, PART, 1}, values + m, M, counts);
                               tile.add_scaled_rows(x.o + m, x.row, factors);
                               tile.write(x.o + m, x.row);
                           });
    if (whole == M) return;
    for (int r = 0; r < ROWS; ++r) {
        float* o = x.o + r * x.row + whole;
        Vec total = load_first(o, M - whole) * broadcast(factors[r]);
        for (Int j = 0; j < counts[r]; ++j)
            total += load_first(values + j * M + whole, M - whole) * broadcast(scores[r * PART + j]);
        store_first(o, M - whole, total);
    }
}

// Requests one of several shares of a part.
inline void request(const KeyStore& store, Int first, Int share, Int shares) {
    const Int keys = PART * store.D * 4 / shares, values = PART * store.M * 4 / shares;
    prefetch_row<false>((const char*)(store.keys + first * store.D) + share * keys, keys);
    prefetch_row<false>((const char*)(store.values + first * store.M) + share * values, values);
}

// `n` queries attend to their keys. While they attend to a part, the next part is requested.
inline void attend_to(const KeyStore& store, const Queries& x, Int n, float scale) {
    Weights weights[QUERIES];
    const Int groups = ceil_div(n, TILE_ROWS);
    for (Int i = 0; i < n; ++i) std::memset(x.o + i * x.row, 0, (size_t)store.M * 4);
    for (Int first = 0; first < x.count + n - 1; first += PART)
        for (Int g = 0; g < groups; ++g) {
            // Queries before `first - x.count + 1` attend to no key of this part.
            const Int begin = max(n * g / groups, first - x.count + 1), end = n * (g + 1) / groups;
            if (begin >= end) continue;
            if (groups > 1) request(store, first + PART, g, groups);
            with_rows(end - begin, [&](auto count) {
                attend_to_part<decltype(count)::value>(x.from(begin), store, first, scale, weights + begin);
            });
        }
    for (Int i = 0; i < n; ++i) {
        const Vec factor = broadcast(1 / sum(weights[i].total));
        for (Int m = 0; m < store.M; m += WIDTH) {
            float* o = x.o + i * x.row + m;
            store_first(o, store.M - m, load_first(o, store.M - m) * factor);
        }
    }
}

}  // namespace UNROLLED_ISA
