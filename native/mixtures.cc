// Mixtures of a row x with another row b: y_z = x + mu_z (b - x), with a share mu for each mixture and
// channel.
//
// Backward, with g_z the gradient of y_z: db = sum over z of mu_z g_z, dx = sum over z of g_z - mu_z g_z, and
// dmu_z = g_z (b - x), summed over the rows. Every number is read and written once.
#include "kernels.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int ROWS = 64;   // of a task forward; backward, rows that are added up in single precision
constexpr Int TASKS = 16;  // backward, each with its own sums

// Two rows as floats.
struct Pair {
    Pair(const Mixtures& problem, Workspace& memory)
        : p(problem), x(memory.floats(round_up(p.channels))), other(memory.floats(round_up(p.channels))) {}

    void read(Int row) const {
        const Int at = row * p.channels * size_of(p.type);
        read_row(p.type, (const char*)p.x + at, p.channels, x);
        read_row(p.type, (const char*)p.other + at, p.channels, other);
    }

    const Mixtures& p;
    float *const x, *const other;
};

Status forward(const Mixtures& p, Int from, Int to) {
    Workspace memory;
    const Pair pair(p, memory);
    float* const y = memory.floats(round_up(p.channels));
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int row = from; row < to; ++row) {
        pair.read(row);
        for (Int z = 0; z < p.mixtures; ++z) {
            const float* mu = p.shares + z * p.channels;
            for (Int c = 0; c < p.channels; c += WIDTH) {
                const Vec x = load(pair.x + c);
                store(y + c, x + load_first(mu + c, p.channels - c) * (load(pair.other + c) - x));
            }
            write_row(p.mixed_type, y, p.channels,
                      (char*)p.mixed[z] + row * p.channels * size_of(p.mixed_type));
        }
    }
    return SUCCESS;
}

// Adds to `sums [mixtures, channels]`.
Status backward(const Mixtures& p, const MixturesGradients& out, Int from, Int to, double* sums) {
    Workspace memory;
    const Int width = round_up(p.channels);
    const Pair pair(p, memory);
    float *const g = memory.floats(width), *const d_x = memory.floats(width);
    float *const d_other = memory.floats(width), *const few = memory.zeros(p.mixtures * width);
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int row = from; row < to; ++row) {
        pair.read(row);
        std::memset(d_x, 0, (size_t)width * 4);
        std::memset(d_other, 0, (size_t)width * 4);
        for (Int z = 0; z < p.mixtures; ++z) {
            const float* mu = p.shares + z * p.channels;
            read_row(p.mixed_type, (const char*)p.mixed[z] + row * p.channels * size_of(p.mixed_type),
                     p.channels, g);
            for (Int c = 0; c < p.channels; c += WIDTH) {
                const Vec all = load(g + c), share = all * load_first(mu + c, p.channels - c);
                store(d_other + c, load(d_other + c) + share);
                store(d_x + c, load(d_x + c) + (all - share));
                float* const sum = few + z * width + c;
                store(sum, load(sum) + all * (load(pair.other + c) - load(pair.x + c)));
            }
        }
        const Int at = row * p.channels * size_of(p.type);
        write_row(p.type, d_x, p.channels, (char*)out.d_x + at);
        write_row(p.type, d_other, p.channels, (char*)out.d_other + at);
        if ((row - from) % ROWS != ROWS - 1 && row != to - 1) continue;
        for (Int z = 0; z < p.mixtures; ++z)
            for (Int c = 0; c < p.channels; ++c) sums[z * p.channels + c] += few[z * width + c];
        std::memset(few, 0, (size_t)(p.mixtures * width) * 4);
    }
    return SUCCESS;
}

Int threads_of(const Mixtures& p) {
    return threads_for((double)(p.rows * p.channels) * (double)p.mixtures, p.threads);
}

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(mixtures)(const Mixtures* p) {
    for (Int z = 0; z < p->mixtures; ++z)
        advise_huge_pages(p->mixed[z], p->rows * p->channels * size_of(p->mixed_type));
    return parallel_for(ceil_div(p->rows, ROWS), threads_of(*p),
                        [&](Int i) { return forward(*p, i * ROWS, min(p->rows, (i + 1) * ROWS)); });
}

Status EXPORTED(mixtures_backward)(const Mixtures* p, const MixturesGradients* out) {
    advise_huge_pages(out->d_x, p->rows * p->channels * size_of(p->type));
    advise_huge_pages(out->d_other, p->rows * p->channels * size_of(p->type));
    const Int n = p->mixtures * p->channels;
    Workspace memory;
    double* sums = (double*)memory.zeros(2 * TASKS * n);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Status status = parallel_for(TASKS, threads_of(*p), [&](Int i) {
        return backward(*p, *out, p->rows * i / TASKS, p->rows * (i + 1) / TASKS, sums + i * n);
    });
    if (status != SUCCESS) return status;
    for (Int j = 0; j < n; ++j) {
        double total = 0;
        for (Int i = 0; i < TASKS; ++i) total += sums[i * n + j];
        out->d_shares[j] = (float)total;
    }
    return SUCCESS;
}
