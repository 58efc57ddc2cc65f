#include "check.h"

namespace {

struct Case {
    int64_t B, T, S, H, G, R, M;
    bool causal, normalize, gated;
    int threads;
    FeatureMap map = IDENTITY_FEATURES;
    int64_t D = 0;  // width of q and k with random features, else 0

    int64_t width() const { return D ? D : R; }
};

Report report;

// elu(x) + 1, the one map that is checked here; the others differ in a line.
float feature(FeatureMap map, float x) {
    return map == IDENTITY_FEATURES ? x : x < 0 ? (float)std::exp((double)x) : x + 1;
}

// All inputs [batch, tokens, heads, width], and the gradients of the outputs.
struct Problem {
    Case c;
    Floats q, k, v, kv, k_sum, grad_o, grad_kv, grad_k_sum, rows, key_shift;
    Doubles log_decay;

    explicit Problem(const Case& c)
        : c(c),
          q(random_floats(c.B * c.T * c.H * c.width(), c.map || c.D ? -3 : 0.1, 1)),
          k(random_floats(c.B * c.S * c.G * c.width(), c.map || c.D ? -3 : 0.1, 1)),
          v(random_floats(c.B * c.S * c.G * c.M, -1, 1)),
          kv(random_floats(c.B * c.G * c.R * c.M, -1, 1)),
          k_sum(random_floats(c.B * c.G * c.R, 0.1, 1)),
          grad_o(random_floats(c.B * c.T * c.H * c.M, -1, 1)),
          grad_kv(random_floats(c.B * c.G * c.R * c.M, -1, 1)),
          grad_k_sum(random_floats(c.B * c.G * c.R, -1, 1)),
          rows(random_floats(c.G * c.R * c.D, -1, 1)),
          key_shift(random_floats(c.B * c.S * c.G, 0, 1)) {
        for (float gate : random_floats(c.B * c.S * c.G, -1, 0)) log_decay.push_back(c.gated ? gate : 0);
    }
};

struct Results {
    Doubles o, kv, k_sum, d_q, d_k, d_v, d_log_decay, d_kv, d_k_sum;
};

Results definition(const Problem& p) {
    const auto [B, T, S, H, G, R, M, causal, normalize, gated, threads, map, D] = p.c;
    Results r;
    const auto zeros = [](int64_t n) { return Doubles((size_t)n, 0.0); };
    r.o = zeros(B * T * H * M), r.kv = zeros(B * G * R * M), r.k_sum = zeros(B * G * R);
    r.d_q = zeros(B * T * H * R), r.d_k = zeros(B * S * G * R), r.d_v = zeros(B * S * G * M);
    r.d_log_decay = zeros(B * S * G), r.d_kv = r.kv, r.d_k_sum = r.k_sum;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t g = 0; g < G; ++g) {
            const float *kv = p.kv.data() + (b * G + g) * R * M, *k_sum = p.k_sum.data() + (b * G + g) * R;
            const float *grad_kv = p.grad_kv.data() + (b * G + g) * R * M,
                        *grad_k_sum = p.grad_k_sum.data() + (b * G + g) * R;
            const auto key = [&](int64_t j) { return p.k.data() + ((b * S + j) * G + g) * R; };
            const auto value = [&](int64_t j) { return p.v.data() + ((b * S + j) * G + g) * M; };
            double* d_log = r.d_log_decay.data() + b * S * G + g;
            Doubles sums(1, 0.0);  // sums[t]: logarithm of the gates before token t
            for (int64_t t = 0; t < S; ++t) sums.push_back(sums.back() + p.log_decay[(b * S + t) * G + g]);
            const auto read_state = [&](const float* query, const double* grad, double d_divisor) {
                double total = 0;
                for (int64_t f = 0; f < R; ++f) {
                    for (int64_t m = 0; m < M; ++m) total += query[f] * kv[f * M + m] * grad[m];
                    total += query[f] * k_sum[f] * d_divisor;
                }
                return total;
            };
            for (int64_t h = g * H / G; h < (g + 1) * H / G; ++h)
                for (int64_t i = 0; i < T; ++i) {
                    const int64_t n = causal ? i + 1 : S;  // keys that it reads
                    const float* query = p.q.data() + ((b * T + i) * H + h) * R;
                    const double start = std::exp(sums[n]);
                    Doubles num = zeros(M), weights, decays;
                    double divisor = 0;
                    for (int64_t f = 0; f < R; ++f) {
                        divisor += start * query[f] * k_sum[f];
                        for (int64_t m = 0; m < M; ++m) num[m] += start * query[f] * kv[f * M + m];
                    }
                    for (int64_t j = 0; j < n; ++j) {
                        double weight = 0;
                        for (int64_t f = 0; f < R; ++f) weight += query[f] * key(j)[f];
                        decays.push_back(std::exp(sums[n] - sums[j + 1]));
                        weights.push_back(weight * decays[j]);
                        divisor += weights[j];
                        for (int64_t m = 0; m < M; ++m) num[m] += weights[j] * value(j)[m];
                    }
                    if (!normalize) divisor = 1;
                    Doubles grad = zeros(M);
                    double d_divisor = 0;
                    for (int64_t m = 0; m < M; ++m) {
                        const int64_t at = ((b * T + i) * H + h) * M + m;
                        r.o[at] = num[m] / divisor;
                        grad[m] = p.grad_o[at] / divisor;
                        if (normalize) d_divisor -= grad[m] * r.o[at];
                    }
                    double* d_query = r.d_q.data() + ((b * T + i) * H + h) * R;
                    for (int64_t f = 0; f < R; ++f) {
                        for (int64_t m = 0; m < M; ++m) {
                            d_query[f] += start * kv[f * M + m] * grad[m];
                            r.d_kv[((b * G + g) * R + f) * M + m] += start * query[f] * grad[m];
                        }
                        d_query[f] += start * k_sum[f] * d_divisor;
                        r.d_k_sum[(b * G + g) * R + f] += start * query[f] * d_divisor;
                    }
                    const double read = start * read_state(query, grad.data(), d_divisor);
                    for (int64_t t = 0; t < n; ++t) d_log[t * G] += read;
                    for (int64_t j = 0; j < n; ++j) {
                        double d_weight = d_divisor;
                        for (int64_t m = 0; m < M; ++m) {
                            d_weight += grad[m] * value(j)[m];
                            r.d_v[((b * S + j) * G + g) * M + m] += weights[j] * grad[m];
                        }
                        for (int64_t f = 0; f < R; ++f) {
                            d_query[f] += d_weight * decays[j] * key(j)[f];
                            r.d_k[((b * S + j) * G + g) * R + f] += d_weight * decays[j] * query[f];
                        }
                        for (int64_t t = j + 1; t < n; ++t) d_log[t * G] += weights[j] * d_weight;
                    }
                }
            const double through = std::exp(sums[S]);
            double passed = 0;
            for (int64_t f = 0; f < R; ++f) {
                const int64_t row = (b * G + g) * R + f;
                r.k_sum[row] += through * k_sum[f];
                r.d_k_sum[row] += through * grad_k_sum[f];
                passed += through * k_sum[f] * grad_k_sum[f];
                for (int64_t m = 0; m < M; ++m) {
                    r.kv[row * M + m] += through * kv[f * M + m];
                    r.d_kv[row * M + m] += through * grad_kv[f * M + m];
                    passed += through * kv[f * M + m] * grad_kv[f * M + m];
                }
            }
            for (int64_t t = 0; t < S; ++t) d_log[t * G] += passed;
            for (int64_t j = 0; j < S; ++j) {
                const double end = std::exp(sums[S] - sums[j + 1]);
                double given = 0;
                for (int64_t f = 0; f < R; ++f) {
                    const int64_t row = (b * G + g) * R + f;
                    r.k_sum[row] += end * key(j)[f];
                    double d_key = grad_k_sum[f];
                    for (int64_t m = 0; m < M; ++m) {
                        r.kv[row * M + m] += end * key(j)[f] * value(j)[m];
                        r.d_v[((b * S + j) * G + g) * M + m] += end * key(j)[f] * grad_kv[f * M + m];
                        d_key += grad_kv[f * M + m] * value(j)[m];
                    }
                    r.d_k[((b * S + j) * G + g) * R + f] += end * d_key;
                    given += end * d_key * key(j)[f];
                }
                for (int64_t t = j + 1; t < S; ++t) d_log[t * G] += given;
            }
        }
    return r;
}

void begin(const char* what, const Case& c) {
    report.begin(
        "%s B=%ld T=%ld S=%ld H=%ld G=%ld R=%ld M=%ld causal=%d normalize=%d gated=%d threads=%d map=%d",
        what, (long)c.B, (long)c.T, (long)c.S, (long)c.H, (long)c.G, (long)c.R, (long)c.M, c.causal,
        c.normalize, c.gated, c.threads, c.map);
}

// W y - |y|^2 / 2 for row i of x, of which there are `heads` for each token.
Doubles exponents(const Problem& p, const Floats& x, size_t i, int64_t heads) {
    const int64_t R = p.c.R, D = p.c.D, group = (int64_t)i % heads * p.c.G / heads;
    Doubles found((size_t)R, 0.0);
    for (int64_t d = 0; d < D; ++d) {
        const double y = std::pow((double)D, -0.25) * x[i * D + d];
        for (int64_t r = 0; r < R; ++r) found[r] += p.rows[(group * R + r) * D + d] * y - y * y / 2;
    }
    return found;
}

double largest(const Doubles& x) { return *std::max_element(x.begin(), x.end()); }

// Random features of every row of x.
Floats random_features(const Problem& p, const Floats& x, int64_t heads, bool keys) {
    Floats features;
    for (size_t i = 0; i < x.size() / (size_t)p.c.D; ++i) {
        const Doubles of_row = exponents(p, x, i, heads);
        const double shift = keys ? p.key_shift[i] : largest(of_row);
        for (double exponent : of_row) features.push_back((float)std::exp(exponent - shift));
    }
    return features;
}

// The gradients of x from those of its random features.
Doubles through_random_features(const Problem& p, const Floats& x, int64_t heads, const Floats& features,
                                const Doubles& gradient) {
    const int64_t R = p.c.R, D = p.c.D;
    const double scale = std::pow((double)D, -0.25);
    Doubles d_x(x.size(), 0.0);
    for (size_t i = 0; i < x.size() / (size_t)D; ++i)
        for (int64_t r = 0; r < R; ++r) {
            const double through = gradient[i * R + r] * features[i * R + r];
            const float* row = p.rows.data() + ((int64_t)i % heads * p.c.G / heads * R + r) * D;
            for (int64_t d = 0; d < D; ++d)
                d_x[i * D + d] += scale * through * (row[d] - scale * x[i * D + d]);
        }
    return d_x;
}

// The results for the features of q and k, with the gradients of q and k themselves.
Results definition_of_features(const Problem& p) {
    Problem mapped = p;
    if (p.c.D) {
        mapped.q = random_features(p, p.q, p.c.H, false);
        mapped.k = random_features(p, p.k, p.c.G, true);
        Results r = definition(mapped);
        r.d_q = through_random_features(p, p.q, p.c.H, mapped.q, r.d_q);
        r.d_k = through_random_features(p, p.k, p.c.G, mapped.k, r.d_k);
        return r;
    }
    for (float& x : mapped.q) x = feature(p.c.map, x);
    for (float& x : mapped.k) x = feature(p.c.map, x);
    Results r = definition(mapped);
    for (size_t i = 0; i < p.q.size() && p.c.map; ++i) r.d_q[i] *= std::min(1.0f, mapped.q[i]);
    for (size_t i = 0; i < p.k.size() && p.c.map; ++i) r.d_k[i] *= std::min(1.0f, mapped.k[i]);
    return r;
}

// W or its transpose for the kernels: `n` matrices, with rows padded to a multiple of 16.
Floats padded(const Floats& rows, int64_t n, int64_t R, int64_t D, bool transposed) {
    const int64_t height = transposed ? D : R, width = transposed ? R : D,
                  padded_width = (width + 15) / 16 * 16;
    Floats to((size_t)(n * height * padded_width), 0.0f);
    for (int64_t g = 0; g < n; ++g)
        for (int64_t r = 0; r < R; ++r)
            for (int64_t d = 0; d < D; ++d)
                to[(g * height + (transposed ? d : r)) * padded_width + (transposed ? r : d)] =
                    rows[(g * R + r) * D + d];
    return to;
}

void check_sequence(const Case& c) {
    begin("sequence", c);
    Problem p(c);
    for (size_t i = 0; c.D && i < p.key_shift.size(); ++i)
        p.key_shift[i] += largest(exponents(p, p.k, i, c.G));
    const Results expected = definition_of_features(p);
    const Floats rows = padded(p.rows, c.G, c.R, c.D, false),
                 transposed = padded(p.rows, c.G, c.R, c.D, true);
    const Linear x = {c.B,
                      c.T,
                      c.S,
                      c.H,
                      c.G,
                      c.R,
                      c.M,
                      FLOAT32,
                      c.causal,
                      c.normalize,
                      c.threads,
                      nullptr,
                      view(p.q, c.T, c.H, c.width()),
                      view(p.k, c.S, c.G, c.width()),
                      view(p.v, c.S, c.G, c.M),
                      c.gated ? p.log_decay.data() : nullptr,
                      nullptr,
                      p.kv.data(),
                      p.k_sum.data(),
                      0,
                      1,
                      c.map,
                      c.D,
                      c.G,
                      c.D ? rows.data() : nullptr,
                      transposed.data(),
                      p.key_shift.data()};
    Floats o(p.grad_o.size(), NAN), kv(p.kv.size(), NAN), k_sum(p.k_sum.size(), NAN);
    Floats divisor((size_t)(c.B * c.T * c.H), NAN);
    const LinearOutputs out = {o.data(), kv.data(), k_sum.data(), divisor.data()};
    report.run([&] { return EXPORTED(linear_forward)(&x, &out); });
    report.compare("o", o, expected.o);
    report.compare("kv", kv, expected.kv);
    report.compare("k_sum", k_sum, expected.k_sum);
    Floats d_q(p.q.size(), NAN), d_k(p.k.size(), NAN), d_v(p.v.size(), NAN), d_kv(kv), d_k_sum(k_sum);
    Floats d_divisor(divisor), read(divisor),
        states((size_t)(c.gated ? EXPORTED(linear_saved_floats)(&x) : 0), NAN);
    Doubles d_log_decay(p.log_decay.size(), NAN);
    const LinearGradients gradients = {view(p.grad_o, c.T, c.H, c.M),
                                       p.grad_kv.data(),
                                       p.grad_k_sum.data(),
                                       divisor.data(),
                                       d_q.data(),
                                       d_k.data(),
                                       d_v.data(),
                                       d_log_decay.data(),
                                       nullptr,
                                       d_kv.data(),
                                       d_k_sum.data(),
                                       d_divisor.data(),
                                       read.data(),
                                       states.data(),
                                       nullptr};
    report.run([&] { return EXPORTED(linear_backward)(&x, &gradients); });
    report.compare("d_q", d_q, expected.d_q);
    report.compare("d_k", d_k, expected.d_k);
    report.compare("d_v", d_v, expected.d_v);
    report.compare("d_kv", d_kv, expected.d_kv);
    report.compare("d_k_sum", d_k_sum, expected.d_k_sum);
    if (c.gated)
        report.compare("d_log_decay", Floats(d_log_decay.begin(), d_log_decay.end()), expected.d_log_decay);
}

void check_peaks(const Case& c) {
    begin("peaks", c);
    const Problem p(c);
    const Floats rows = padded(p.rows, c.G, c.R, c.D, false),
                 transposed = padded(p.rows, c.G, c.R, c.D, true);
    Linear x = {};
    x.sequences = c.B, x.keys = c.S, x.heads = x.groups = c.G, x.features = c.R;
    x.threads = c.threads, x.width = c.D, x.row_heads = c.G;
    x.k = view(p.k, c.S, c.G, c.D);
    x.rows = rows.data(), x.transposed_rows = transposed.data();
    Floats peaks(p.key_shift.size(), NAN);
    const KeyPeaks out = {peaks.data()};
    report.run([&] { return EXPORTED(key_peaks)(&x, &out); });
    Doubles expected;
    for (size_t i = 0; i < peaks.size(); ++i) expected.push_back(largest(exponents(p, p.k, i, c.G)));
    report.compare("peak", peaks, expected);
}

// One step is a sequence of one token.
void check_step(const Case& c) {
    begin("step", c);
    const Problem p(c);
    const Results expected = definition_of_features(p);
    Floats o(p.grad_o.size(), NAN), kv(p.kv.size(), NAN), k_sum(p.k_sum.size(), NAN);
    const LinearStep x = {c.B,
                          c.H,
                          c.G,
                          c.R,
                          c.M,
                          FLOAT32,
                          c.normalize,
                          c.threads,
                          c.map,
                          view(p.q, 1, c.H, c.R),
                          view(p.k, 1, c.G, c.R),
                          view(p.v, 1, c.G, c.M),
                          c.gated ? p.log_decay.data() : nullptr,
                          nullptr,
                          nullptr,
                          p.kv.data(),
                          p.k_sum.data(),
                          o.data(),
                          kv.data(),
                          k_sum.data()};
    report.run([&] { return EXPORTED(linear_step)(&x); });
    report.compare("o", o, expected.o);
    report.compare("kv", kv, expected.kv);
    report.compare("k_sum", k_sum, expected.k_sum);
}

}  // namespace

int main() {
    for (int flags = 0; flags < 8; ++flags)
        for (int threads : {1, 3}) {
            const bool causal = flags & 1, normalize = flags & 2, gated = flags & 4;
            for (int64_t T : {0, 1, 15, 33, 70})
                for (int64_t width : {1, 7, 16, 33}) {
                    check_sequence({2, T, T, 4, 2, width, 20, causal, normalize, gated, threads});
                    if (!causal)
                        check_sequence({1, T, 40, 1, 1, 9, width, causal, normalize, gated, threads});
                }
            // Enough work for threads, and one head, so that the sequence is cut into segments.
            check_sequence({1, 260, 260, 1, 1, 64, 65, causal, normalize, gated, threads});
            // Several of the states that the backward pass keeps.
            check_sequence({1, 600, 600, 2, 1, 9, 20, causal, normalize, gated, threads});
            check_step({3, 1, 1, 4, 2, 33, 20, true, normalize, gated, threads});
            for (int64_t width : {7, 16, 33})
                check_sequence({2, 70, 70, 4, 2, width, 20, causal, normalize, gated, threads, ELU_FEATURES});
            check_step({3, 1, 1, 4, 2, 33, 20, true, normalize, gated, threads, ELU_FEATURES});
            for (int64_t width : {7, 16, 33})
                check_sequence(
                    {2, 70, 70, 4, 2, 40, 20, causal, true, gated, threads, IDENTITY_FEATURES, width});
        }
    for (int threads : {1, 3})
        for (int64_t width : {7, 16, 33}) {
            check_peaks({2, 0, 70, 2, 2, 40, 1, false, true, false, threads, IDENTITY_FEATURES, width});
            check_peaks({1, 0, 300, 8, 8, 64, 1, false, true, false, threads, IDENTITY_FEATURES, width});
        }
    report.fail_allocations = true;
    for (int flags = 0; flags < 8; ++flags)
        for (int threads : {1, 3}) {
            const bool causal = flags & 1, normalize = flags & 2, gated = flags & 4;
            check_sequence({1, 130, 130, 2, 1, 64, 65, causal, normalize, gated, threads});
            check_step({300, 1, 1, 1, 1, 33, 33, true, normalize, gated, threads});
            check_sequence({1, 70, 70, 2, 1, 40, 33, causal, true, gated, threads, IDENTITY_FEATURES, 16});
            check_peaks({1, 0, 300, 8, 8, 64, 1, false, true, false, threads, IDENTITY_FEATURES, 16});
        }
    return report.end();
}
