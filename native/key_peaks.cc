// The largest exponent of the random features of each key, from which the caller makes the shifts.
#include "feature_rows.h"
#include "kernels.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int TOKENS = 64;  // of a task

Status run(const Linear& x, float* out) {
    const Int parts = ceil_div(x.keys, TOKENS);
    const double work = (double)(x.sequences * x.keys) * (double)(x.groups * x.features * x.width);
    return parallel_for(x.sequences * parts, threads_for(work, x.threads), [&](Int i) {
        Workspace memory;
        FeatureRows keys(x, Side::KEYS, TOKENS, memory, false);
        if (memory.failed()) return OUT_OF_MEMORY;
        const Int token = i % parts * TOKENS, n = min(TOKENS, x.keys - token);
        for (Int g = 0; g < x.groups; ++g) keys.peaks(i / parts, token, g, n, out);
        return SUCCESS;
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(key_peaks)(const Linear* x, const KeyPeaks* out) { return UNROLLED_ISA::run(*x, out->peak); }
