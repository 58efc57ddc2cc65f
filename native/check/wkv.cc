// Checks the weighted averages of RWKV-4 and their gradients against their definitions in double precision.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, C;
    int threads;
    bool padded;
};

Report report;

void check(const Case& c) {
    report.begin("wkv B=%ld T=%ld C=%ld threads=%d padded=%d", (long)c.B, (long)c.T, (long)c.C, c.threads,
                 c.padded);
    const int64_t of_tokens = c.B * c.T * c.C, of_state = c.B * 3 * c.C;
    const Floats k = random_floats(of_tokens, -4, 4), v = random_floats(of_tokens, -1, 1);
    const Floats d = random_floats(c.C, -2, 0), u = random_floats(c.C, -1, 1);
    const Floats grad_o = random_floats(of_tokens, -1, 1), grad_state = random_floats(of_state, -1, 1);
    Floats state = random_floats(of_state, 0.1, 1);  // den is above 0
    std::vector<uint8_t> padding((size_t)(c.B * c.T));
    for (size_t i = 0; i < padding.size(); ++i) padding[i] = c.padded && i % 5 < 2;
    for (int64_t i = 0; c.C % 2 && i < c.C; ++i) state[i] = state[c.C + i] = 0, state[2 * c.C + i] = -1e30f;
    Doubles o(k.size(), 0.0), after(state.size(), 0.0), d_k(k.size(), 0.0), d_v(k.size(), 0.0);
    Doubles d_d(d.size(), 0.0), d_u(d.size(), 0.0), d_state(state.size(), 0.0);
    Doubles num((size_t)c.T + 1), den((size_t)c.T + 1), m((size_t)c.T + 1);
    for (int64_t row = 0; row < c.B; ++row)
        for (int64_t ch = 0; ch < c.C; ++ch) {
            const auto at = [&](int64_t t) { return (row * c.T + t) * c.C + ch; };
            const auto place = [&](int64_t i) { return (row * 3 + i) * c.C + ch; };
            const auto skipped = [&](int64_t t) { return padding[(size_t)(row * c.T + t)] != 0; };
            const double decay = d[ch], bonus = u[ch];
            num[0] = state[place(0)], den[0] = state[place(1)], m[0] = state[place(2)];
            for (int64_t t = 0; t < c.T; ++t) {
                num[t + 1] = num[t], den[t + 1] = den[t], m[t + 1] = m[t];
                if (skipped(t)) continue;
                const double peak = std::max(m[t], k[at(t)] + bonus), kept = std::exp(m[t] - peak);
                const double own = std::exp(k[at(t)] + bonus - peak);
                o[at(t)] = (kept * num[t] + own * v[at(t)]) / (kept * den[t] + own);
                m[t + 1] = std::max(m[t] + decay, (double)k[at(t)]);
                const double a = std::exp(m[t] + decay - m[t + 1]), w = std::exp(k[at(t)] - m[t + 1]);
                num[t + 1] = a * num[t] + w * v[at(t)], den[t + 1] = a * den[t] + w;
            }
            after[place(0)] = num[c.T], after[place(1)] = den[c.T], after[place(2)] = m[c.T];
            double d_num = grad_state[place(0)], d_den = grad_state[place(1)];
            for (int64_t t = c.T - 1; t >= 0; --t) {
                if (skipped(t)) continue;
                const double a = std::exp(m[t] + decay - m[t + 1]), w = std::exp(k[at(t)] - m[t + 1]);
                const double peak = std::max(m[t], k[at(t)] + bonus), kept = std::exp(m[t] - peak);
                const double own = std::exp(k[at(t)] + bonus - peak);
                const double g = grad_o[at(t)] / (kept * den[t] + own);
                const double by_own = g * own * (v[at(t)] - o[at(t)]);
                d_v[at(t)] = g * own + w * d_num;
                d_k[at(t)] = by_own + w * (d_num * v[at(t)] + d_den);
                d_u[ch] += by_own;
                d_d[ch] += a * (d_num * num[t] + d_den * den[t]);
                d_num = a * d_num + g * kept, d_den = a * d_den - g * kept * o[at(t)];
            }
            d_state[place(0)] = d_num, d_state[place(1)] = d_den;
        }
    const Wkv problem = {c.B,
                         c.T,
                         c.C,
                         FLOAT32,
                         c.threads,
                         nullptr,
                         c.padded ? padding.data() : nullptr,
                         view(k, c.T, 1, c.C),
                         view(v, c.T, 1, c.C),
                         d.data(),
                         u.data(),
                         state.data()};
    Floats found_o(k.size(), NAN), found_after(state.size(), NAN), found_d_k(k.size(), NAN);
    Floats found_d_v(k.size(), NAN), found_d_d(d.size(), NAN), found_d_u(d.size(), NAN);
    Floats found_d_state(state.size(), NAN);
    const WkvOutputs out = {found_o.data(), found_after.data()};
    report.run([&] { return EXPORTED(wkv_forward)(&problem, &out); });
    const WkvGradients gradients = {view(grad_o, c.T, 1, c.C), grad_state.data(), found_d_k.data(),
                                    found_d_v.data(),          found_d_d.data(),  found_d_u.data(),
                                    found_d_state.data()};
    report.run([&] { return EXPORTED(wkv_backward)(&problem, &gradients); });
    report.compare("o", found_o, o);
    report.compare("state", found_after, after);
    report.compare("d_k", found_d_k, d_k);
    report.compare("d_v", found_d_v, d_v);
    report.compare("d_log_decay", found_d_d, d_d);
    report.compare("d_bonus", found_d_u, d_u);
    report.compare("d_state", found_d_state, d_state);
}

}  // namespace

int main() {
    for (int threads : {1, 3})
        for (int64_t T : {0, 1, 31, 70})
            for (int64_t C : {1, 16, 33, 130})
                for (bool padded : {false, true}) check({2, T, C, threads, padded});
    check({40, 3, 5, 1, false});  // more sequences than sums of the gradients of d and u
    report.fail_allocations = true;
    for (int threads : {1, 3}) check({2, 70, 130, threads, true});
    return report.end();
}
