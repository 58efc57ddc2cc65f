// Checks linear attention with a decay for every feature, and the delta rule with such decays, against their
// definition, token by token, and the definition's own backward pass.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, H, G, R, M;
    float lowest;  // of the logarithms of the gates; every seventh gate is 0
    int threads;
    bool delta = false;  // the delta rule, with keys of length 1 at most
};

Report report;

// All inputs [batch, tokens, heads, width], and the gradients of the outputs.
struct Problem {
    Case c;
    Floats q, k, v, log_decay, rates, state, grad_o, grad_state;

    explicit Problem(const Case& c)
        : c(c),
          q(random_floats(c.B * c.T * c.H * c.R, -1, 1)),
          k(random_floats(c.B * c.T * c.G * c.R, -longest(c), longest(c))),
          v(random_floats(c.B * c.T * c.G * c.M, -1, 1)),
          log_decay(random_floats(c.B * c.T * c.G * c.R, c.lowest, 0)),
          rates(random_floats(c.delta ? c.B * c.T * c.G : 0, 0, 2)),
          state(random_floats(c.B * c.G * c.R * c.M, -1, 1)),
          grad_o(random_floats(c.B * c.T * c.H * c.M, -1, 1)),
          grad_state(random_floats(c.B * c.G * c.R * c.M, -1, 1)) {
        for (size_t i = 0; i < log_decay.size(); i += 7) log_decay[i] = -INFINITY;
    }

    static double longest(const Case& c) { return c.delta ? 1 / std::sqrt((double)c.R) : 1; }
};

struct Results {
    Doubles o, state, d_q, d_k, d_v, d_log_decay, d_rates, d_state;
};

// One head: S <- diag(a) S + k n^T, o = S^T q, and back. The values are n, or r (v - S^T diag(a) k).
class Head {
  public:
    Head(const Problem& p, int64_t b, int64_t g, Results& r) : p_(p), c_(p.c), b_(b), g_(g), r_(r) {}

    void run() {
        const int64_t size = c_.R * c_.M, begin = (b_ * c_.G + g_) * size;
        Doubles S(p_.state.begin() + begin, p_.state.begin() + begin + size);
        for (int64_t t = 0; t < c_.T; ++t) forward(t, S);
        r_.state.insert(r_.state.end(), S.begin(), S.end());
        Doubles dS(p_.grad_state.begin() + begin, p_.grad_state.begin() + begin + size);
        for (int64_t t = c_.T - 1; t >= 0; --t) backward(t, dS);
        r_.d_state.insert(r_.d_state.end(), dS.begin(), dS.end());
    }

  private:
    int64_t token(int64_t t) const { return (b_ * c_.T + t) * c_.G + g_; }
    double key(int64_t t, int64_t f) const { return p_.k[token(t) * c_.R + f]; }
    double rate(int64_t t) const { return c_.delta ? p_.rates[token(t)] : 1; }
    double gate(int64_t t, int64_t f) const { return std::exp((double)p_.log_decay[token(t) * c_.R + f]); }

    void forward(int64_t t, Doubles& S) {
        before_.push_back(S);
        Doubles residual(c_.M);
        for (int64_t m = 0; m < c_.M; ++m) {
            residual[m] = p_.v[token(t) * c_.M + m];
            for (int64_t f = 0; f < c_.R; ++f) {
                double& value = S[f * c_.M + m];
                value *= gate(t, f);
                if (c_.delta) residual[m] -= value * key(t, f);
            }
        }
        decayed_.push_back(S), residuals_.push_back(residual);
        for (int64_t f = 0; f < c_.R; ++f)
            for (int64_t m = 0; m < c_.M; ++m) {
                double& value = S[f * c_.M + m];
                value += key(t, f) * rate(t) * residual[m];
                for (int64_t h = g_ * c_.H / c_.G; h < (g_ + 1) * c_.H / c_.G; ++h) {
                    const int64_t query = (b_ * c_.T + t) * c_.H + h;
                    r_.o[query * c_.M + m] += value * p_.q[query * c_.R + f];
                }
            }
        after_.push_back(S);
    }

    void backward(int64_t t, Doubles& dS) {
        const Doubles& u = residuals_[t];
        Doubles d_value(c_.M, 0.0);
        for (int64_t f = 0; f < c_.R; ++f)
            for (int64_t m = 0; m < c_.M; ++m) {
                double& gradient = dS[f * c_.M + m];
                for (int64_t h = g_ * c_.H / c_.G; h < (g_ + 1) * c_.H / c_.G; ++h) {
                    const int64_t query = (b_ * c_.T + t) * c_.H + h;
                    r_.d_q[query * c_.R + f] += after_[t][f * c_.M + m] * p_.grad_o[query * c_.M + m];
                    gradient += (double)p_.q[query * c_.R + f] * p_.grad_o[query * c_.M + m];
                }
                r_.d_k[token(t) * c_.R + f] += gradient * rate(t) * u[m];
                d_value[m] += gradient * key(t, f);
            }
        for (int64_t m = 0; m < c_.M; ++m) {
            if (c_.delta) r_.d_rates[token(t)] += d_value[m] * u[m];
            r_.d_v[token(t) * c_.M + m] = d_value[m] *= rate(t);
        }
        for (int64_t f = 0; f < c_.R; ++f)
            for (int64_t m = 0; m < c_.M; ++m) {
                double& gradient = dS[f * c_.M + m];
                if (c_.delta) {
                    gradient -= key(t, f) * d_value[m];
                    r_.d_k[token(t) * c_.R + f] -= decayed_[t][f * c_.M + m] * d_value[m];
                }
                gradient *= gate(t, f);
                r_.d_log_decay[token(t) * c_.R + f] += gradient * before_[t][f * c_.M + m];
            }
    }

    const Problem& p_;
    const Case& c_;
    const int64_t b_, g_;
    Results& r_;
    std::vector<Doubles> before_, decayed_, after_, residuals_;  // of each token
};

Results definition(const Problem& p) {
    Results r;
    const auto zeros = [](const Floats& like) { return Doubles(like.size(), 0.0); };
    r.o = zeros(p.grad_o), r.d_q = zeros(p.q), r.d_k = zeros(p.k), r.d_v = zeros(p.v);
    r.d_log_decay = zeros(p.log_decay), r.d_rates = zeros(p.rates);
    for (int64_t b = 0; b < p.c.B; ++b)
        for (int64_t g = 0; g < p.c.G; ++g) Head(p, b, g, r).run();
    return r;
}

void begin(const char* what, const Case& c) {
    report.begin("%s%s B=%ld T=%ld H=%ld G=%ld R=%ld M=%ld lowest=%g threads=%d", c.delta ? "delta " : "",
                 what, (long)c.B, (long)c.T, (long)c.H, (long)c.G, (long)c.R, (long)c.M, c.lowest, c.threads);
}

void check_sequence(const Case& c) {
    begin("sequence", c);
    const Problem p(c);
    const Results expected = definition(p);
    const Gla x = {c.B,
                   c.T,
                   c.T,
                   c.H,
                   c.G,
                   c.R,
                   c.M,
                   FLOAT32,
                   c.threads,
                   nullptr,
                   view(p.q, c.T, c.H, c.R),
                   view(p.k, c.T, c.G, c.R),
                   view(p.v, c.T, c.G, c.M),
                   view(p.log_decay, c.T, c.G, c.R),
                   c.delta ? p.rates.data() : nullptr,
                   p.state.data()};
    Floats o(p.grad_o.size(), NAN), state(p.state.size(), NAN);
    const GlaOutputs out = {o.data(), state.data()};
    report.run([&] { return EXPORTED(gla_forward)(&x, &out); });
    report.compare("o", o, expected.o);
    report.compare("state", state, expected.state);
    Floats d_q(p.q.size(), NAN), d_k(p.k.size(), NAN), d_v(p.v.size(), NAN);
    Floats d_log_decay(p.log_decay.size(), NAN), d_state(p.state.size(), NAN);
    Floats d_rates(p.rates.size(), NAN), residuals(c.delta ? p.v.size() : 0, NAN);
    const GlaGradients gradients = {view(p.grad_o, c.T, c.H, c.M),
                                    p.grad_state.data(),
                                    d_q.data(),
                                    d_k.data(),
                                    d_v.data(),
                                    d_log_decay.data(),
                                    d_state.data(),
                                    d_rates.data(),
                                    residuals.data()};
    report.run([&] { return EXPORTED(gla_backward)(&x, &gradients); });
    report.compare("d_q", d_q, expected.d_q);
    report.compare("d_k", d_k, expected.d_k);
    report.compare("d_v", d_v, expected.d_v);
    report.compare("d_log_decay", d_log_decay, expected.d_log_decay);
    report.compare("d_rates", d_rates, expected.d_rates);
    report.compare("d_state", d_state, expected.d_state);
}

// One step is a sequence of one token.
void check_step(const Case& c) {
    begin("step", c);
    const Problem p(c);
    const Results expected = definition(p);
    Floats o(p.grad_o.size(), NAN), state(p.state.size(), NAN);
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
                          nullptr,
                          p.log_decay.data(),
                          c.delta ? p.rates.data() : nullptr,
                          p.state.data(),
                          nullptr,
                          o.data(),
                          state.data(),
                          nullptr};
    report.run([&] { return EXPORTED(linear_step)(&x); });
    report.compare("o", o, expected.o);
    report.compare("state", state, expected.state);
}

}  // namespace

int main() {
    for (bool delta : {false, true}) {
        report.fail_allocations = false;
        for (int threads : {1, 3})
            for (float lowest : {-0.1f, -30.0f}) {
                for (int64_t T : {0, 1, 7, 8, 9, 70, 130})
                    for (int64_t width : {1, 7, 16, 33})
                        check_sequence({2, T, 4, 2, width, 20, lowest, threads, delta});
                check_sequence({1, 200, 3, 1, 64, 65, lowest, threads, delta});
                check_step({3, 1, 4, 2, 33, 20, lowest, threads, delta});
            }
        report.fail_allocations = true;
        check_sequence({2, 70, 4, 2, 33, 65, -1, 3, delta});
        check_step({300, 1, 1, 1, 33, 33, -1, 3, delta});
    }
    return report.end();
}
