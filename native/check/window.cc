#include "check.h"

namespace {

struct Case {
    int64_t B, T, S, H, G, D, M, left, right;
    bool padded;
    int threads;
};

Report report;

void check(const Case& c) {
    const auto [B, T, S, H, G, D, M, left, right, padded, threads] = c;
    report.begin("B=%ld T=%ld S=%ld H=%ld G=%ld D=%ld M=%ld left=%ld right=%ld padded=%d threads=%d", (long)B,
                 (long)T, (long)S, (long)H, (long)G, (long)D, (long)M, (long)left, (long)right, padded,
                 threads);
    const double scale = 1 / std::sqrt((double)D);
    const Floats q = random_floats(B * T * H * D, -2, 2), k = random_floats(B * S * G * D, -2, 2);
    const Floats v = random_floats(B * S * G * M, -1, 1);
    const Floats grad_o = random_floats(B * T * H * M, -1, 1), grad_lse = random_floats(B * T * H, -1, 1);
    std::vector<uint8_t> padding;
    for (float draw : random_floats(B * S, 0, 1)) padding.push_back(padded && draw < 0.4f);

    Doubles o(grad_o.size()), lse(grad_lse.size()), d_q(q.size()), d_k(k.size()), d_v(v.size());
    for (int64_t b = 0; b < B; ++b)
        for (int64_t i = 0; i < T; ++i)
            for (int64_t h = 0; h < H; ++h) {
                const int64_t g = h / (H / G), row = (b * T + i) * H + h, at = i + S - T;
                const float *query = q.data() + row * D, *grad = grad_o.data() + row * M;
                Doubles weights;
                std::vector<int64_t> keys;
                double total = 0;
                for (int64_t j = 0; j < S; ++j) {
                    if (j < at - left || j > at + right || padding[(size_t)(b * S + j)]) continue;
                    double score = 0;
                    for (int64_t d = 0; d < D; ++d)
                        score += scale * query[d] * k[((b * S + j) * G + g) * D + d];
                    weights.push_back(std::exp(score));
                    keys.push_back((b * S + j) * G + g);
                    total += weights.back();
                }
                lse[row] = std::log(total);
                double delta = keys.empty() ? 0 : -grad_lse[row];
                Doubles d_weights;
                for (size_t n = 0; n < keys.size(); ++n) {
                    weights[n] /= total;
                    d_weights.push_back(0);
                    for (int64_t m = 0; m < M; ++m) {
                        o[row * M + m] += weights[n] * v[keys[n] * M + m];
                        d_weights[n] += grad[m] * v[keys[n] * M + m];
                        d_v[keys[n] * M + m] += weights[n] * grad[m];
                    }
                    delta += weights[n] * d_weights[n];
                }
                for (size_t n = 0; n < keys.size(); ++n)
                    for (int64_t d = 0; d < D; ++d) {
                        const double d_score = scale * weights[n] * (d_weights[n] - delta);
                        d_q[row * D + d] += d_score * k[keys[n] * D + d];
                        d_k[keys[n] * D + d] += d_score * query[d];
                    }
            }

    const Window x = {B,
                      T,
                      S,
                      H,
                      G,
                      D,
                      M,
                      left,
                      right,
                      FLOAT32,
                      threads,
                      scale,
                      nullptr,
                      padded ? padding.data() : nullptr,
                      view(q, T, H, D),
                      view(k, S, G, D),
                      view(v, S, G, M)};
    Floats found_o(o.size(), NAN), found_lse(lse.size(), NAN), found_q(q.size(), NAN);
    const WindowOutputs out = {found_o.data(), found_lse.data()};
    report.run([&] { return EXPORTED(window_forward)(&x, &out); });
    report.compare("o", found_o, o);
    report.compare("lse", found_lse, lse);
    Floats found_k(k.size(), 0), found_v(v.size(), 0);
    const WindowGradients gradients = {view(grad_o, T, H, M), grad_lse.data(), found_lse.data(),
                                       found_q.data(),        found_k.data(),  found_v.data()};
    report.run([&] { return EXPORTED(window_backward)(&x, &gradients); });
    report.compare("d_q", found_q, d_q);
    report.compare("d_k", found_k, d_k);
    report.compare("d_v", found_v, d_v);
}

}  // namespace

int main() {
    for (bool padded : {false, true})
        for (int threads : {1, 3}) {
            for (int64_t T : {0, 1, 15, 33, 130})
                for (int64_t width : {1, 7, 16, 33})
                    for (int64_t left : {0, 5, 200}) {
                        check({2, T, T, 4, 2, width, 20, left, 0, padded, threads});
                        check({1, T, 40, 1, 1, 9, width, left, 7, padded, threads});
                    }
            // Enough work for threads; then more keys than one group holds.
            check({1, 600, 600, 1, 1, 32, 33, 20, 30, padded, threads});
            check({1, 40, 1100, 1, 1, 16, 16, 1100, 0, padded, threads});
        }
    report.fail_allocations = true;
    for (bool padded : {false, true})
        for (int threads : {1, 3}) check({1, 600, 600, 1, 1, 32, 33, 20, 30, padded, threads});
    return report.end();
}
