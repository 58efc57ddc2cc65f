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

}  // namespace

int main() {
    for (int64_t rows : {1, 3, 4, 9, 17, 32})
        for (int64_t width : {1, 7, 16, 33, 200})
            for (int threads : {1, 3}) {
                check_dense(rows, width, 21, threads);
                check_dense(rows, 600, 350 + width, threads);
            }
    report.fail_allocations = true;
    for (int64_t rows : {1, 9})
        for (int threads : {1, 3}) {
            check_dense(rows, 600, 350, threads);
        }
    return report.end();
}
