// Checks mixtures of two rows and their gradients against their definition in double precision.
#include "check.h"

namespace {

Report report;

void check(int64_t rows, int64_t channels, int64_t mixtures, int threads) {
    report.begin("mixtures rows=%ld channels=%ld mixtures=%ld threads=%d", (long)rows, (long)channels,
                 (long)mixtures, threads);
    const int64_t n = rows * channels;
    const Floats x = random_floats(n, -1, 1), other = random_floats(n, -1, 1);
    const Floats shares = random_floats(mixtures * channels, 0, 1), d_y = random_floats(mixtures * n, -1, 1);
    Doubles y(d_y.size()), d_x(x.size(), 0.0), d_other(x.size(), 0.0), d_shares(shares.size(), 0.0);
    for (int64_t z = 0; z < mixtures; ++z)
        for (int64_t i = 0; i < n; ++i) {
            const double mu = shares[z * channels + i % channels], g = d_y[z * n + i];
            y[z * n + i] = x[i] + mu * ((double)other[i] - x[i]);
            d_x[i] += g * (1 - mu), d_other[i] += g * mu;
            d_shares[z * channels + i % channels] += g * ((double)other[i] - x[i]);
        }
    Floats found(y.size(), NAN), given = d_y;
    std::vector<void*> mixed, of_mixed;
    for (int64_t z = 0; z < mixtures; ++z)
        mixed.push_back(found.data() + z * n), of_mixed.push_back(given.data() + z * n);
    Mixtures problem = {rows,    channels, mixtures,     FLOAT32,       FLOAT32,
                        threads, x.data(), other.data(), shares.data(), mixed.data()};
    report.run([&] { return EXPORTED(mixtures)(&problem); });
    report.compare("y", found, y);
    Floats found_x(x.size(), NAN), found_other(x.size(), NAN), found_shares(shares.size(), NAN);
    problem.mixed = of_mixed.data();
    const MixturesGradients gradients = {found_x.data(), found_other.data(), found_shares.data()};
    report.run([&] { return EXPORTED(mixtures_backward)(&problem, &gradients); });
    report.compare("d_x", found_x, d_x);
    report.compare("d_other", found_other, d_other);
    report.compare("d_shares", found_shares, d_shares);
}

}  // namespace

int main() {
    for (int threads : {1, 3})
        for (int64_t rows : {0, 1, 63, 300, 2100})
            for (int64_t channels : {0, 1, 16, 33, 100})
                for (int64_t mixtures : {1, 2, 6}) check(rows, channels, mixtures, threads);
    report.fail_allocations = true;
    for (int threads : {1, 3}) check(300, 100, 3, threads);
    return report.end();
}
