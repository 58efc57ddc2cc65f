// Checks the selective scan and its gradients against their definitions in double precision.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, C, N;
    int threads;
    bool apart;  // whether the step sizes lie channel by channel
};

Report report;

void check(const Case& c) {
    report.begin("selective scan B=%ld T=%ld C=%ld N=%ld threads=%d apart=%d", (long)c.B, (long)c.T,
                 (long)c.C, (long)c.N, c.threads, c.apart);
    const int64_t of_channels = c.B * c.T * c.C, of_states = c.B * c.T * c.N, of_state = c.B * c.C * c.N;
    const Floats x = random_floats(of_channels, -1, 1), dt = random_floats(of_channels, 0, 0.5);
    const Floats b = random_floats(of_states, -1, 1), readers = random_floats(of_states, -1, 1);
    const Floats a = random_floats(c.C * c.N, -2, 0), state = random_floats(of_state, -1, 1);
    const Floats grad_y = random_floats(of_channels, -1, 1), grad_state = random_floats(of_state, -1, 1);
    Doubles y(x.size(), 0.0), after(state.size(), 0.0), d_x(x.size(), 0.0), d_dt(x.size(), 0.0);
    Doubles d_b(b.size(), 0.0), d_c(b.size(), 0.0), d_a(a.size(), 0.0), d_state(state.size(), 0.0);
    Doubles h((size_t)c.T + 1);
    for (int64_t row = 0; row < c.B; ++row)
        for (int64_t ch = 0; ch < c.C; ++ch)
            for (int64_t n = 0; n < c.N; ++n) {
                const int64_t place = (row * c.C + ch) * c.N + n;
                const double rate = a[ch * c.N + n];
                const auto channel = [&](int64_t t) { return (row * c.T + t) * c.C + ch; };
                const auto number = [&](int64_t t) { return (row * c.T + t) * c.N + n; };
                h[0] = state[place];
                for (int64_t t = 0; t < c.T; ++t) {
                    h[t + 1] = std::exp(dt[channel(t)] * rate) * h[t] +
                               (double)dt[channel(t)] * x[channel(t)] * b[number(t)];
                    y[channel(t)] += h[t + 1] * readers[number(t)];
                }
                after[place] = h[c.T];
                double g = grad_state[place];
                for (int64_t t = c.T - 1; t >= 0; --t) {
                    const double step = dt[channel(t)], e = std::exp(step * rate);
                    d_c[number(t)] += h[t + 1] * grad_y[channel(t)];
                    g += (double)readers[number(t)] * grad_y[channel(t)];
                    d_b[number(t)] += g * step * x[channel(t)];
                    d_x[channel(t)] += g * step * b[number(t)];
                    d_dt[channel(t)] += g * (e * h[t] * rate + (double)x[channel(t)] * b[number(t)]);
                    g *= e;
                    d_a[ch * c.N + n] += g * h[t] * step;
                }
                d_state[place] = g;
            }
    Floats laid_out = dt;
    Tensor steps = {laid_out.data(), c.T * c.C, c.C, 1};
    if (c.apart) {
        steps.token = 1, steps.head = c.T;
        for (int64_t row = 0; row < c.B; ++row)
            for (int64_t t = 0; t < c.T; ++t)
                for (int64_t ch = 0; ch < c.C; ++ch)
                    laid_out[(row * c.C + ch) * c.T + t] = dt[(row * c.T + t) * c.C + ch];
    }
    const SelectiveScan problem = {c.B,
                                   c.T,
                                   c.C,
                                   c.N,
                                   FLOAT32,
                                   c.threads,
                                   nullptr,
                                   view(x, c.T, 1, c.C),
                                   view(b, c.T, 1, c.N),
                                   view(readers, c.T, 1, c.N),
                                   steps,
                                   a.data(),
                                   state.data()};
    Floats found_y(x.size(), NAN), found_after(state.size(), NAN), found_d_x(x.size(), NAN);
    Floats found_d_dt(x.size(), NAN), found_d_b(b.size(), NAN), found_d_c(b.size(), NAN);
    Floats found_d_a(a.size(), NAN), found_d_state(state.size(), NAN);
    const SelectiveScanOutputs out = {found_y.data(), found_after.data()};
    report.run([&] { return EXPORTED(selective_scan_forward)(&problem, &out); });
    const SelectiveScanGradients gradients = {
        view(grad_y, c.T, 1, c.C), grad_state.data(), found_d_x.data(), found_d_b.data(),
        found_d_c.data(),          found_d_dt.data(), found_d_a.data(), found_d_state.data()};
    report.run([&] { return EXPORTED(selective_scan_backward)(&problem, &gradients); });
    report.compare("y", found_y, y);
    report.compare("state", found_after, after);
    report.compare("d_x", found_d_x, d_x);
    report.compare("d_dt", found_d_dt, d_dt);
    report.compare("d_a", found_d_a, d_a);
    report.compare("d_b", found_d_b, d_b);
    report.compare("d_c", found_d_c, d_c);
    report.compare("d_state", found_d_state, d_state);
    if (c.T != 1) return;
    Floats y_of_step(x.size(), NAN), after_step(state.size(), NAN);
    const SelectiveScanOutputs of_step = {y_of_step.data(), after_step.data()};
    report.run([&] { return EXPORTED(selective_scan_step)(&problem, &of_step); });
    report.compare("y of a step", y_of_step, y);
    report.compare("state after a step", after_step, after);
}

}  // namespace

int main() {
    for (int threads : {1, 3})
        for (int64_t T : {0, 1, 31, 70})
            for (int64_t C : {1, 16, 33, 130})
                for (int64_t N : {1, 8, 16, 19}) check({2, T, C, N, threads, N % 2 == 0});
    check({40, 3, 5, 4, 1, false});  // more sequences than sums of the gradients of a
    report.fail_allocations = true;
    for (int threads : {1, 3})
        for (int64_t T : {1, 70}) check({2, T, 130, 16, threads, false});
    return report.end();
}
