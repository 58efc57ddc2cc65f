#include "sampling.h"

#include <algorithm>
#include <cmath>

namespace {

using unrolled::Candidate;

// Among equal logits the lower token counts as more likely.
bool likelier(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.token < b.token);
}

bool earlier(const Candidate& a, const Candidate& b) { return a.token < b.token; }

// How many of the candidates, the likeliest first, make up the share `p` of their probability. The largest
// value is 0. Candidates are sorted only as far as they are needed: those within 2 of the largest, then those
// within 4 and 8, then the rest.
int64_t nucleus(Candidate* x, int64_t n, double p) {
    double total = 0, before = 0, width = 2;
    for (int64_t i = 0; i < n; ++i) total += std::exp(x[i].value);
    int64_t kept = 0, sorted = 0;
    for (; kept < n && before < p; ++kept) {
        while (kept == sorted) {
            Candidate* end =
                std::partition(x + sorted, x + n, [=](const Candidate& c) { return c.value >= -width; });
            std::sort(x + sorted, end, likelier);
            sorted = end - x;
            width = width < 8 ? 2 * width : INFINITY;  // -inf is within infinity too
        }
        before += std::exp(x[kept].value) / total;
    }
    return kept;
}

}  // namespace

double unrolled::random_number(int64_t key, int64_t index) {
    uint64_t x = (uint64_t)key + ((uint64_t)index + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

int64_t unrolled::draw(const Sampling& options, int64_t vocabulary, const float* logits, const uint8_t* seen,
                       double random, Candidate* x) {
    Candidate most{-INFINITY, -1};
    for (int64_t i = 0; i < vocabulary; ++i) {
        double logit = logits[i];
        if (seen && seen[i])
            logit = logit > 0 ? logit / options.repetition_penalty : logit * options.repetition_penalty;
        if (!(logit < INFINITY)) return -1;
        x[i] = {logit, i};
        if (logit > most.value) most = x[i];
    }
    if (most.token < 0 || options.temperature == 0) return most.token;
    int64_t n = vocabulary;
    for (int64_t i = 0; i < n; ++i) {
        const double shifted = x[i].value - most.value;
        x[i].value = shifted == 0 ? 0 : shifted / options.temperature;
    }
    const bool reordered = options.top_k < n || options.top_p < 1;
    if (options.top_k < n) {
        n = options.top_k;
        std::nth_element(x, x + n - 1, x + vocabulary, likelier);
    }
    if (options.top_p < 1) n = nucleus(x, n, options.top_p);
    if (options.min_p > 0) {
        const double least = std::log(options.min_p);
        n = std::remove_if(x, x + n, [=](const Candidate& c) { return c.value < least; }) - x;
    }
    if (reordered) std::sort(x, x + n, earlier);
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += x[i].value = std::exp(x[i].value);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) x[i].value = sum += x[i].value / total;
    const double threshold = sum * random;
    for (int64_t i = 0; i < n; ++i)
        if (x[i].value > threshold) return x[i].token;
    return x[n - 1].token;  // not reached: the last sum is above any share of itself
}
