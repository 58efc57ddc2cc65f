#include "check.h"

namespace {

Report report;

void check_dense(int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    report.begin("dense rows=%ld inputs=%ld outputs=%ld threads=%d", (long)rows, (long)inputs, (long)outputs,
                 threads);
    const Floats x = random_floats(rows * inputs, -1, 1), bias = random_floats(outputs, -1, 1);
    const Floats weights = random_floats(outputs * inputs, -1, 1);
    Floats y((size_t)(rows * outputs), NAN);
    Doubles expected;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t o = 0; o < outputs; ++o) {
            double total = bias[o];
            for (int64_t i = 0; i < inputs; ++i) total += (double)x[r * inputs + i] * weights[o * inputs + i];
            expected.push_back(total);
        }
    const Dense d = {rows,     inputs,         outputs,     FLOAT32, threads,
                     x.data(), weights.data(), bias.data(), y.data()};
    report.run([&] { return EXPORTED(dense)(&d); });
    report.compare("y", y, expected);
}

// Pre-norm blocks whose layers all return 0 return their input.
void check_stack(int64_t rows, int64_t features, int32_t activation, int threads) {
    report.begin("stack rows=%ld features=%ld activation=%d threads=%d", (long)rows, (long)features,
                 activation, threads);
    const int64_t width = 48, hidden = 32, H = 4, G = 2, M = 20,
                  up = activation == SWIGLU ? 2 * hidden : hidden;
    const int64_t qkv = (H + G) * features + G * M;
    const Floats x = random_floats(rows * width, -1, 1), ones(width, 1),
                 zeros((size_t)(width * (qkv + up + hidden)));
    const Floats out((size_t)(width * H * M)), before((size_t)(rows * G * features * M));
    Floats kv(2 * before.size(), NAN), k_sum((size_t)(2 * rows * G * features), NAN), y(x.size(), NAN);
    const Norm norm = {ones.data(), nullptr};
    const Layer none = {zeros.data(), nullptr};
    const TransformerBlock block = {width, hidden, H,    G,          features,
                                    M,     1,      0,    activation, ELU_FEATURES,
                                    1e-5f, norm,   norm, none,       {out.data(), nullptr},
                                    none,  none};
    const TransformerBlock* blocks[] = {&block, &block};
    const float* states[] = {before.data(), before.data()};
    float *kv_after[] = {kv.data(), kv.data() + before.size()},
          *k_sum_after[] = {k_sum.data(), k_sum.data() + rows * G * features};
    const StackStep step = {rows,   2,        threads,     blocks,   states,
                            states, kv_after, k_sum_after, x.data(), y.data()};
    report.run([&] { return EXPORTED(stack_step)(&step); });
    report.compare("y", y, Doubles(x.begin(), x.end()));
    report.compare("k_sum", k_sum, Doubles(k_sum.size(), 1));  // elu(0) + 1
}

}  // namespace

int main() {
    for (int64_t rows : {1, 3, 4, 9, 17, 32})
        for (int64_t width : {1, 7, 16, 33, 200})
            for (int threads : {1, 3}) {
                check_dense(rows, width, 21, threads);
                check_dense(rows, 600, 350 + width, threads);
                check_stack(rows, width, GELU + (int32_t)rows % 3, threads);
            }
    report.fail_allocations = true;
    for (int64_t rows : {1, 9})
        for (int threads : {1, 3}) {
            check_dense(rows, 600, 350, threads);
            check_stack(rows, 16, SWIGLU, threads);
        }
    return report.end();
}
