// Checks the rule of a diagonal plus low rank against its definition, token by token, and the definition's
// own backward pass.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, H, R, M;
    float lowest;  // of the logarithms of the gates; every seventh gate is 0
    int threads;
};

Report report;

// All inputs [batch, tokens, heads, width], and the gradients of the outputs. |a_t| |b_t| is at most 2.
struct Problem {
    Case c;
    Floats q, k, v, a, b, log_decay, state, grad_o, grad_state;

    explicit Problem(const Case& c)
        : c(c),
          q(random_floats(tokens(c) * c.R, -1, 1)),
          k(random_floats(tokens(c) * c.R, -1, 1)),
          v(random_floats(tokens(c) * c.M, -1, 1)),
          a(random_floats(tokens(c) * c.R, -longest(c), longest(c))),
          b(random_floats(tokens(c) * c.R, -2 * longest(c), 2 * longest(c))),
          log_decay(random_floats(tokens(c) * c.R, c.lowest, 0)),
          state(random_floats(c.B * c.H * c.R * c.M, -1, 1)),
          grad_o(random_floats(tokens(c) * c.M, -1, 1)),
          grad_state(random_floats(c.B * c.H * c.R * c.M, -1, 1)) {
        for (size_t i = 0; i < log_decay.size(); i += 7) log_decay[i] = -INFINITY;
    }

    static int64_t tokens(const Case& c) { return c.B * c.T * c.H; }
    static double longest(const Case& c) { return 1 / std::sqrt((double)c.R); }
};

struct Results {
    Doubles o, state, d_q, d_k, d_v, d_a, d_b, d_log_decay, d_state;
};

// One head: u = S^T a, S <- diag(w) S + b u^T + k v^T, o = S^T q, and back.
class Head {
  public:
    Head(const Problem& p, int64_t b, int64_t h, Results& r) : p_(p), c_(p.c), b_(b), h_(h), r_(r) {}

    void run() {
        const int64_t size = c_.R * c_.M, begin = (b_ * c_.H + h_) * size;
        Doubles S(p_.state.begin() + begin, p_.state.begin() + begin + size);
        for (int64_t t = 0; t < c_.T; ++t) forward(t, S);
        r_.state.insert(r_.state.end(), S.begin(), S.end());
        Doubles dS(p_.grad_state.begin() + begin, p_.grad_state.begin() + begin + size);
        for (int64_t t = c_.T - 1; t >= 0; --t) backward(t, dS);
        r_.d_state.insert(r_.d_state.end(), dS.begin(), dS.end());
    }

  private:
    int64_t token(int64_t t) const { return (b_ * c_.T + t) * c_.H + h_; }
    double gate(int64_t t, int64_t f) const { return std::exp((double)p_.log_decay[token(t) * c_.R + f]); }

    void forward(int64_t t, Doubles& S) {
        const int64_t row = token(t) * c_.R, out = token(t) * c_.M;
        before_.push_back(S);
        Doubles read(c_.M, 0.0);
        for (int64_t f = 0; f < c_.R; ++f)
            for (int64_t m = 0; m < c_.M; ++m) read[m] += S[f * c_.M + m] * p_.a[row + f];
        for (int64_t f = 0; f < c_.R; ++f)
            for (int64_t m = 0; m < c_.M; ++m) {
                double& value = S[f * c_.M + m];
                value = gate(t, f) * value + p_.b[row + f] * read[m] + (double)p_.k[row + f] * p_.v[out + m];
                r_.o[out + m] += value * p_.q[row + f];
            }
        reads_.push_back(read), after_.push_back(S);
    }

    void backward(int64_t t, Doubles& dS) {
        const int64_t row = token(t) * c_.R, out = token(t) * c_.M;
        Doubles d_read(c_.M, 0.0);
        for (int64_t f = 0; f < c_.R; ++f)
            for (int64_t m = 0; m < c_.M; ++m) {
                double& gradient = dS[f * c_.M + m];
                r_.d_q[row + f] += after_[t][f * c_.M + m] * p_.grad_o[out + m];
                gradient += (double)p_.q[row + f] * p_.grad_o[out + m];
                r_.d_k[row + f] += gradient * p_.v[out + m];
                r_.d_v[out + m] += gradient * p_.k[row + f];
                r_.d_b[row + f] += gradient * reads_[t][m];
                d_read[m] += gradient * p_.b[row + f];
            }
        for (int64_t f = 0; f < c_.R; ++f)
            for (int64_t m = 0; m < c_.M; ++m) {
                double& gradient = dS[f * c_.M + m];
                const double before = before_[t][f * c_.M + m];
                r_.d_log_decay[row + f] += gradient * gate(t, f) * before;
                r_.d_a[row + f] += before * d_read[m];
                gradient = gate(t, f) * gradient + p_.a[row + f] * d_read[m];
            }
    }

    const Problem& p_;
    const Case& c_;
    const int64_t b_, h_;
    Results& r_;
    std::vector<Doubles> before_, after_, reads_;  // of each token
};

Results definition(const Problem& p) {
    Results r;
    const auto zeros = [](const Floats& like) { return Doubles(like.size(), 0.0); };
    r.o = zeros(p.grad_o), r.d_q = zeros(p.q), r.d_k = zeros(p.k), r.d_v = zeros(p.v);
    r.d_a = zeros(p.a), r.d_b = zeros(p.b), r.d_log_decay = zeros(p.log_decay);
    for (int64_t b = 0; b < p.c.B; ++b)
        for (int64_t h = 0; h < p.c.H; ++h) Head(p, b, h, r).run();
    return r;
}

void check(const Case& c) {
    report.begin("B=%ld T=%ld H=%ld R=%ld M=%ld lowest=%g threads=%d", (long)c.B, (long)c.T, (long)c.H,
                 (long)c.R, (long)c.M, c.lowest, c.threads);
    const Problem p(c);
    const Results expected = definition(p);
    const auto tokenwise = [&](const Floats& x, int64_t width) { return view(x, c.T, c.H, width); };
    const Dplr x = {c.B,
                    c.T,
                    c.H,
                    c.R,
                    c.M,
                    FLOAT32,
                    c.threads,
                    nullptr,
                    tokenwise(p.q, c.R),
                    tokenwise(p.k, c.R),
                    tokenwise(p.v, c.M),
                    tokenwise(p.a, c.R),
                    tokenwise(p.b, c.R),
                    tokenwise(p.log_decay, c.R),
                    p.state.data()};
    Floats o(p.grad_o.size(), NAN), state(p.state.size(), NAN);
    const GlaOutputs out = {o.data(), state.data()};
    report.run([&] { return EXPORTED(dplr_forward)(&x, &out); });
    report.compare("o", o, expected.o);
    report.compare("state", state, expected.state);
    Floats d_q(p.q.size(), NAN), d_k(p.k.size(), NAN), d_v(p.v.size(), NAN), d_a(p.a.size(), NAN);
    Floats d_b(p.b.size(), NAN), d_log_decay(p.log_decay.size(), NAN), d_state(p.state.size(), NAN);
    Floats reads(p.v.size(), NAN);
    const DplrGradients gradients = {tokenwise(p.grad_o, c.M),
                                     p.grad_state.data(),
                                     d_q.data(),
                                     d_k.data(),
                                     d_v.data(),
                                     d_a.data(),
                                     d_b.data(),
                                     d_log_decay.data(),
                                     d_state.data(),
                                     reads.data()};
    report.run([&] { return EXPORTED(dplr_backward)(&x, &gradients); });
    report.compare("d_q", d_q, expected.d_q);
    report.compare("d_k", d_k, expected.d_k);
    report.compare("d_v", d_v, expected.d_v);
    report.compare("d_a", d_a, expected.d_a);
    report.compare("d_b", d_b, expected.d_b);
    report.compare("d_log_decay", d_log_decay, expected.d_log_decay);
    report.compare("d_state", d_state, expected.d_state);
}

}  // namespace

int main() {
    for (int threads : {1, 3})
        for (float lowest : {-0.1f, -30.0f}) {
            for (int64_t T : {0, 1, 7, 8, 9, 70, 130})
                for (int64_t width : {1, 7, 16, 33}) check({2, T, 2, width, 20, lowest, threads});
            check({1, 200, 1, 64, 65, lowest, threads});
        }
    report.fail_allocations = true;
    check({2, 70, 2, 33, 65, -1, 3});
    return report.end();
}
