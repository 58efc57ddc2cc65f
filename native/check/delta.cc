// Checks the delta rule against its definition, token by token, and the definition's own backward pass.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, H, G, R, M;
    bool gated, reflecting;  // reflecting: rates up to 2
    int threads;
};

Report report;

// All inputs [batch, tokens, heads, width], and the gradients of the outputs.
struct Problem {
    Case c;
    Floats q, k, v, rates, kv, grad_o, grad_kv;
    Doubles log_decay;

    explicit Problem(const Case& c)
        : c(c),
          q(random_floats(c.B * c.T * c.H * c.R, -1, 1)),
          k(random_floats(c.B * c.T * c.G * c.R, -1, 1)),
          v(random_floats(c.B * c.T * c.G * c.M, -1, 1)),
          rates(random_floats(c.B * c.T * c.G, 0, c.reflecting ? 2 : 1)),
          kv(random_floats(c.B * c.G * c.R * c.M, -1, 1)),
          grad_o(random_floats(c.B * c.T * c.H * c.M, -1, 1)),
          grad_kv(random_floats(c.B * c.G * c.R * c.M, -1, 1)) {
        for (float gate : random_floats(c.B * c.T * c.G, -0.5, 0)) log_decay.push_back(c.gated ? gate : 0);
        for (float& value : k) value /= std::sqrt((float)c.R);  // of length at most 1
    }
};

struct Results {
    Doubles o, kv, d_q, d_k, d_v, d_rates, d_log_decay, d_kv;
};

// S <- a S, u = v - S^T k, S <- S + r k u^T, o = S^T q.
Results definition(const Problem& p) {
    const auto [B, T, H, G, R, M, gated, reflecting, threads] = p.c;
    Results r;
    const auto zeros = [](int64_t n) { return Doubles((size_t)n, 0.0); };
    r.o = zeros(B * T * H * M), r.d_q = zeros(B * T * H * R), r.d_k = zeros(B * T * G * R);
    r.d_v = zeros(B * T * G * M), r.d_rates = zeros(B * T * G), r.d_log_decay = zeros(B * T * G);
    for (int64_t b = 0; b < B; ++b)
        for (int64_t g = 0; g < G; ++g) {
            const float* first = p.kv.data() + (b * G + g) * R * M;
            std::vector<Doubles> decayed, states{Doubles(first, first + R * M)}, residuals;
            for (int64_t t = 0; t < T; ++t) {
                const int64_t at = (b * T + t) * G + g;
                Doubles S = states.back(), u = zeros(M);
                for (double& value : S) value *= std::exp(p.log_decay[at]);
                decayed.push_back(S);
                for (int64_t m = 0; m < M; ++m) {
                    u[m] = p.v[at * M + m];
                    for (int64_t f = 0; f < R; ++f) u[m] -= S[f * M + m] * p.k[at * R + f];
                    for (int64_t f = 0; f < R; ++f) S[f * M + m] += p.rates[at] * p.k[at * R + f] * u[m];
                    for (int64_t h = g * H / G; h < (g + 1) * H / G; ++h)
                        for (int64_t f = 0; f < R; ++f)
                            r.o[((b * T + t) * H + h) * M + m] +=
                                S[f * M + m] * p.q[((b * T + t) * H + h) * R + f];
                }
                states.push_back(S);
                residuals.push_back(u);
            }
            r.kv.insert(r.kv.end(), states.back().begin(), states.back().end());
            const float* last = p.grad_kv.data() + (b * G + g) * R * M;
            Doubles dS(last, last + R * M);
            for (int64_t t = T - 1; t >= 0; --t) {
                const int64_t at = (b * T + t) * G + g;
                const double rate = p.rates[at], gate = std::exp(p.log_decay[at]);
                Doubles du = zeros(M);
                for (int64_t f = 0; f < R; ++f)
                    for (int64_t m = 0; m < M; ++m) {
                        for (int64_t h = g * H / G; h < (g + 1) * H / G; ++h) {
                            const int64_t query = (b * T + t) * H + h;
                            r.d_q[query * R + f] += states[t + 1][f * M + m] * p.grad_o[query * M + m];
                            dS[f * M + m] += p.q[query * R + f] * p.grad_o[query * M + m];
                        }
                        const double key = p.k[at * R + f], written = dS[f * M + m] * residuals[t][m];
                        r.d_rates[at] += key * written;
                        r.d_k[at * R + f] += rate * written;
                        du[m] += rate * key * dS[f * M + m];
                    }
                for (int64_t f = 0; f < R; ++f)
                    for (int64_t m = 0; m < M; ++m) {
                        r.d_k[at * R + f] -= decayed[t][f * M + m] * du[m];
                        dS[f * M + m] -= p.k[at * R + f] * du[m];
                        r.d_log_decay[at] += dS[f * M + m] * decayed[t][f * M + m];
                        dS[f * M + m] *= gate;
                    }
                for (int64_t m = 0; m < M; ++m) r.d_v[at * M + m] = du[m];
            }
            r.d_kv.insert(r.d_kv.end(), dS.begin(), dS.end());
        }
    return r;
}

void begin(const char* what, const Case& c) {
    report.begin("%s B=%ld T=%ld H=%ld G=%ld R=%ld M=%ld gated=%d reflecting=%d threads=%d", what, (long)c.B,
                 (long)c.T, (long)c.H, (long)c.G, (long)c.R, (long)c.M, c.gated, c.reflecting, c.threads);
}

void check_sequence(const Case& c) {
    begin("delta rule", c);
    const Problem p(c);
    const Results expected = definition(p);
    const double* gates = c.gated ? p.log_decay.data() : nullptr;
    const Linear x = {c.B,
                      c.T,
                      c.T,
                      c.H,
                      c.G,
                      c.R,
                      c.M,
                      FLOAT32,
                      true,
                      false,
                      c.threads,
                      nullptr,
                      view(p.q, c.T, c.H, c.R),
                      view(p.k, c.T, c.G, c.R),
                      view(p.v, c.T, c.G, c.M),
                      gates,
                      p.rates.data(),
                      p.kv.data(),
                      nullptr,
                      0,
                      1,
                      IDENTITY_FEATURES};
    Floats o(p.grad_o.size(), NAN), kv(p.kv.size(), NAN);
    const LinearOutputs out = {o.data(), kv.data(), nullptr, nullptr};
    report.run([&] { return EXPORTED(linear_forward)(&x, &out); });
    report.compare("o", o, expected.o);
    report.compare("kv", kv, expected.kv);
    Floats d_q(p.q.size(), NAN), d_k(p.k.size(), NAN), d_v(p.v.size(), NAN), d_kv(kv.size(), NAN);
    Floats d_rates(p.rates.size(), NAN), read((size_t)(c.B * c.T * c.H), NAN), residuals(d_v);
    Floats states((size_t)EXPORTED(linear_saved_floats)(&x), NAN);
    Doubles d_log_decay(p.log_decay.size(), NAN);
    const LinearGradients gradients = {view(p.grad_o, c.T, c.H, c.M),
                                       p.grad_kv.data(),
                                       nullptr,
                                       nullptr,
                                       d_q.data(),
                                       d_k.data(),
                                       d_v.data(),
                                       d_log_decay.data(),
                                       d_rates.data(),
                                       d_kv.data(),
                                       nullptr,
                                       nullptr,
                                       read.data(),
                                       states.data(),
                                       residuals.data()};
    report.run([&] { return EXPORTED(linear_backward)(&x, &gradients); });
    report.compare("d_q", d_q, expected.d_q);
    report.compare("d_k", d_k, expected.d_k);
    report.compare("d_v", d_v, expected.d_v);
    report.compare("d_rates", d_rates, expected.d_rates);
    report.compare("d_kv", d_kv, expected.d_kv);
    if (c.gated)
        report.compare("d_log_decay", Floats(d_log_decay.begin(), d_log_decay.end()), expected.d_log_decay);
}

// One step is a sequence of one token.
void check_step(const Case& c) {
    begin("step", c);
    const Problem p(c);
    const Results expected = definition(p);
    Floats o(p.grad_o.size(), NAN), kv(p.kv.size(), NAN);
    const LinearStep x = {c.B,
                          c.H,
                          c.G,
                          c.R,
                          c.M,
                          FLOAT32,
                          false,
                          c.threads,
                          IDENTITY_FEATURES,
                          view(p.q, 1, c.H, c.R),
                          view(p.k, 1, c.G, c.R),
                          view(p.v, 1, c.G, c.M),
                          c.gated ? p.log_decay.data() : nullptr,
                          nullptr,
                          p.rates.data(),
                          p.kv.data(),
                          nullptr,
                          o.data(),
                          kv.data(),
                          nullptr};
    report.run([&] { return EXPORTED(linear_step)(&x); });
    report.compare("o", o, expected.o);
    report.compare("kv", kv, expected.kv);
}

}  // namespace

int main() {
    for (int flags = 0; flags < 4; ++flags)
        for (int threads : {1, 3}) {
            const bool gated = flags & 1, reflecting = flags & 2;
            for (int64_t T : {0, 1, 15, 33, 70})
                for (int64_t width : {1, 7, 16, 33})
                    check_sequence({2, T, 4, 2, width, 20, gated, reflecting, threads});
            check_sequence({1, 130, 1, 1, 64, 65, gated, reflecting, threads});
            // Several of the states that the backward pass keeps.
            check_sequence({1, 300, 2, 1, 9, 20, gated, reflecting, threads});
            check_step({3, 1, 4, 2, 33, 20, gated, reflecting, threads});
        }
    report.fail_allocations = true;
    for (int flags = 0; flags < 4; ++flags) {
        check_sequence({1, 40, 2, 1, 64, 65, bool(flags & 1), bool(flags & 2), 3});
        check_step({300, 1, 1, 1, 33, 33, bool(flags & 1), bool(flags & 2), 3});
    }
    return report.end();
}
