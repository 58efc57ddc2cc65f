// Checks the scaling of heads and its gradients against their definition in double precision.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, H, M;
    int threads;
    bool activation, weight, gate, gate_first;
    int32_t gate_function;
};

Report report;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// silu or the logistic function, and its derivative.
void evaluate(int32_t function, double x, double& value, double& slope) {
    const double s = sigmoid(x);
    value = function == SIGMOID ? s : x * s;
    slope = function == SIGMOID ? s * (1 - s) : s * (1 + x * (1 - s));
}

void check(const Case& c) {
    report.begin(
        "head_scale B=%ld T=%ld H=%ld M=%ld threads=%d activation=%d weight=%d gate=%d first=%d "
        "function=%d",
        (long)c.B, (long)c.T, (long)c.H, (long)c.M, c.threads, c.activation, c.weight, c.gate, c.gate_first,
        c.gate_function);
    const int64_t n = c.B * c.T * c.H * c.M;
    const Floats x = random_floats(n, -3, 3), gate = random_floats(n, -4, 4), d_y = random_floats(n, -1, 1);
    const Floats weight = random_floats(c.H * c.M, -1, 1);
    const double length = 1.7, eps = 1e-3;
    Doubles y(x.size()), d_x(x.size()), d_gate(x.size()), d_weight(weight.size());
    Doubles u((size_t)c.M), by_x((size_t)c.M), by_gate((size_t)c.M), d_n((size_t)c.M);
    for (int64_t head = 0; head < c.B * c.T * c.H; ++head) {
        double square = eps, along = 0;
        for (int64_t i = 0; i < c.M; ++i) {
            u[i] = x[head * c.M + i], by_x[i] = 1;
            if (c.activation) evaluate(SILU, x[head * c.M + i], u[i], by_x[i]);
            if (c.gate_first) {
                double g, g_slope;
                evaluate(c.gate_function, gate[head * c.M + i], g, g_slope);
                by_gate[i] = u[i] * g_slope;
                u[i] *= g, by_x[i] *= g;
            }
            square += u[i] * u[i];
        }
        const double factor = (float)length / std::sqrt(square);
        for (int64_t i = 0; i < c.M; ++i) {
            const int64_t at = head * c.M + i, of_weight = head % c.H * c.M + i;
            double g = 1, g_slope = 0;
            if (c.gate && !c.gate_first) evaluate(c.gate_function, gate[at], g, g_slope);
            const double w = c.weight ? weight[of_weight] : 1, normed = u[i] * factor;
            y[at] = normed * w * g;
            d_gate[at] = d_y[at] * normed * w * g_slope;
            d_weight[of_weight] += d_y[at] * normed * g;
            d_n[i] = d_y[at] * w * g;
            along += d_n[i] * u[i];
        }
        for (int64_t i = 0; i < c.M; ++i) {
            const double d_u = factor * (d_n[i] - u[i] * along / square);
            d_x[head * c.M + i] = d_u * by_x[i];
            if (c.gate_first) d_gate[head * c.M + i] = d_u * by_gate[i];
        }
    }
    Floats found(x.size(), NAN), found_x(x.size(), NAN), found_gate(x.size(), NAN),
        found_weight(weight.size(), NAN);
    HeadScale problem = {};
    problem.rows = c.B, problem.tokens = c.T, problem.heads = c.H, problem.width = c.M;
    problem.type = problem.gate_type = FLOAT32;
    problem.activation = c.activation, problem.gate_function = c.gate_function;
    problem.gate_first = c.gate_first, problem.threads = c.threads;
    problem.length = (float)length, problem.eps = (float)eps;
    problem.x = view(x, c.T, c.H, c.M);
    if (c.gate) problem.gate = view(gate, c.T, c.H, c.M);
    if (c.weight) problem.weight = weight.data();
    const HeadScaleOutputs outputs = {found.data()};
    report.run([&] { return EXPORTED(head_scale)(&problem, &outputs); });
    report.compare("y", found, y);
    const HeadScaleGradients gradients = {d_y.data(), found_x.data(), c.gate ? found_gate.data() : nullptr,
                                          c.weight ? found_weight.data() : nullptr};
    report.run([&] { return EXPORTED(head_scale_backward)(&problem, &gradients); });
    report.compare("d_x", found_x, d_x);
    if (c.gate) report.compare("d_gate", found_gate, d_gate);
    if (c.weight) report.compare("d_weight", found_weight, d_weight);
}

}  // namespace

int main() {
    for (int threads : {1, 3})
        for (int64_t T : {0, 1, 70, 200})
            for (int64_t M : {1, 7, 16, 32, 100})
                for (int options = 0; options < 12; ++options)  // a gate, if any, before or after the norm
                    for (int32_t function : {(int32_t)SILU, (int32_t)SIGMOID})
                        check({2, T, 3, M, threads, (options & 1) != 0, (options & 2) != 0, options >= 4,
                               options >= 8, function});
    report.fail_allocations = true;
    for (int threads : {1, 3}) check({3, 300, 8, 64, threads, true, true, true, true, SILU});
    return report.end();
}
