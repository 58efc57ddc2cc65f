// Checks the rotation of rotary positions against its definition in double precision.
#include "check.h"

namespace {

struct Case {
    int64_t B, T, H, D, pairs;
    int threads;
    bool shared;
};

Report report;

void check(const Case& c) {
    report.begin("rotary B=%ld T=%ld H=%ld D=%ld pairs=%ld threads=%d shared=%d", (long)c.B, (long)c.T,
                 (long)c.H, (long)c.D, (long)c.pairs, c.threads, c.shared);
    const int64_t rows = c.shared ? 1 : c.B;
    Floats x = random_floats(c.B * c.T * c.H * c.D, -1, 1);
    // Neighbours of the pairs that no factor may reach.
    for (size_t i = 0; i < x.size(); ++i)
        if ((int64_t)i % c.D >= 2 * c.pairs) x[i] = i % 2 ? INFINITY : -INFINITY;
    const Floats angles = random_floats(rows * c.T * c.pairs, -4, 4);
    Floats cos(angles.size()), sin(angles.size());
    for (size_t i = 0; i < angles.size(); ++i) cos[i] = std::cos(angles[i]), sin[i] = std::sin(angles[i]);
    Doubles y(x.begin(), x.end());
    for (int64_t b = 0; b < c.B; ++b)
        for (int64_t t = 0; t < c.T; ++t)
            for (int64_t h = 0; h < c.H; ++h)
                for (int64_t i = 0; i < c.pairs; ++i) {
                    const int64_t at = ((b * c.T + t) * c.H + h) * c.D + 2 * i;
                    const double angle = angles[((c.shared ? 0 : b) * c.T + t) * c.pairs + i];
                    y[at] = x[at] * std::cos(angle) - x[at + 1] * std::sin(angle);
                    y[at + 1] = x[at] * std::sin(angle) + x[at + 1] * std::cos(angle);
                }
    Floats found(x.size(), NAN);
    const Rotary problem = {c.B,        c.T,        c.H,
                            c.D,        c.pairs,    FLOAT32,
                            c.threads,  c.shared,   view(x, c.T, c.H, c.D),
                            cos.data(), sin.data(), found.data()};
    report.run([&] { return EXPORTED(rotary)(&problem); });
    report.compare("y", found, y);
}

}  // namespace

int main() {
    for (int threads : {1, 3})
        for (bool shared : {false, true})
            for (int64_t T : {0, 1, 70, 300})
                for (int64_t D : {2, 15, 16, 64, 100})
                    for (int64_t pairs : {int64_t(0), D / 4, D / 2})
                        check({2, T, 3, D, pairs, threads, shared});
    report.fail_allocations = true;
    for (int threads : {1, 3}) check({3, 300, 8, 64, 20, threads, true});
    return report.end();
}
