// Checks the causal convolution, with a bias and silu, and its gradients against their definitions in double
// precision.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, C, taps;
    int activation, threads;
};

Report report;

void check(const Case& c) {
    report.begin("conv B=%ld T=%ld C=%ld taps=%ld activation=%d threads=%d", (long)c.B, (long)c.T, (long)c.C,
                 (long)c.taps, c.activation, c.threads);
    const int64_t past = c.taps - 1, rows = past + c.T;  // the state's inputs, then the tokens
    const Floats x = random_floats(c.B * c.T * c.C, -1, 1), state = random_floats(c.B * past * c.C, -1, 1);
    const Floats weight = random_floats(c.taps * c.C, -1, 1), bias = random_floats(c.C, -1, 1);
    const Floats grad_y = random_floats(c.B * c.T * c.C, -1, 1),
                 grad_state = random_floats(c.B * past * c.C, -1, 1);
    Doubles y(x.size(), 0.0), after(state.size(), 0.0), d_x(x.size(), 0.0), d_state(state.size(), 0.0);
    Doubles d_weight(weight.size(), 0.0), d_bias(bias.size(), 0.0);
    for (int64_t b = 0; b < c.B; ++b)
        for (int64_t ch = 0; ch < c.C; ++ch) {
            const auto input = [&](int64_t row) {
                return row < past ? state[(b * past + row) * c.C + ch] : x[(b * c.T + row - past) * c.C + ch];
            };
            const auto d_input = [&](int64_t row) -> double& {
                return row < past ? d_state[(b * past + row) * c.C + ch]
                                  : d_x[(b * c.T + row - past) * c.C + ch];
            };
            for (int64_t t = 0; t < c.T; ++t) {
                const int64_t at = (b * c.T + t) * c.C + ch;
                double z = bias[ch];
                for (int64_t l = 0; l < c.taps; ++l) z += (double)weight[l * c.C + ch] * input(past + t - l);
                const double s = 1 / (1 + std::exp(-z));
                y[at] = c.activation ? z * s : z;
                const double d_z = grad_y[at] * (c.activation ? s * (1 + z * (1 - s)) : 1);
                d_bias[ch] += d_z;
                for (int64_t l = 0; l < c.taps; ++l) {
                    d_input(past + t - l) += (double)weight[l * c.C + ch] * d_z;
                    d_weight[l * c.C + ch] += d_z * input(past + t - l);
                }
            }
            for (int64_t i = 0; i < past; ++i) {
                after[(b * past + i) * c.C + ch] = input(rows - past + i);
                d_input(rows - past + i) += grad_state[(b * past + i) * c.C + ch];
            }
        }
    const Conv problem = {c.B,           c.T,         c.C,
                          c.taps,        FLOAT32,     c.activation,
                          c.threads,     nullptr,     view(x, c.T, 1, c.C),
                          weight.data(), bias.data(), state.data()};
    Floats found_y(x.size(), NAN), found_after(state.size(), NAN), found_d_x(x.size(), NAN);
    Floats found_d_state(state.size(), NAN), found_d_weight(weight.size(), NAN);
    Floats found_d_bias(bias.size(), NAN);
    const ConvOutputs out = {found_y.data(), found_after.data()};
    report.run([&] { return EXPORTED(conv_forward)(&problem, &out); });
    const ConvGradients gradients = {view(grad_y, c.T, 1, c.C), grad_state.data(),   found_d_x.data(),
                                     found_d_weight.data(),     found_d_bias.data(), found_d_state.data()};
    report.run([&] { return EXPORTED(conv_backward)(&problem, &gradients); });
    report.compare("y", found_y, y);
    report.compare("state", found_after, after);
    report.compare("d_x", found_d_x, d_x);
    report.compare("d_weight", found_d_weight, d_weight);
    report.compare("d_bias", found_d_bias, d_bias);
    report.compare("d_state", found_d_state, d_state);
}

}  // namespace

int main() {
    for (int threads : {1, 3})
        for (int64_t taps : {1, 2, 4, 7})
            for (int64_t T : {0, 1, 3, 70, 1100})
                for (int64_t C : {1, 16, 33, 130})
                    for (int activation : {0, 1}) check({2, T, C, taps, activation, threads});
    report.fail_allocations = true;
    for (int threads : {1, 3}) check({2, 1100, 65, 4, 1, threads});
    return report.end();
}
