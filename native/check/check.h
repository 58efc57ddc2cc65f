// Checks of the kernels without Python, for sanitizers and emulators. Each program compares operations and
// their gradients with their definitions in double precision, and lets every allocation of a kernel fail
// once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../kernels.h"
#include "../workspace.h"

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

inline Floats random_floats(int64_t n, double low, double high) {
    static std::mt19937 generator(0);
    std::uniform_real_distribution<float> draw((float)low, (float)high);
    Floats x((size_t)n);
    for (float& value : x) value = draw(generator);
    return x;
}

// A contiguous tensor [batch, tokens, heads, width].
inline Tensor view(const Floats& x, int64_t tokens, int64_t heads, int64_t width) {
    return {x.data(), tokens * heads * width, heads * width, width};
}

// The number of allocations of the running kernel, on all threads, and the index of the one that fails.
std::atomic<int64_t> allocations{0}, failing{-1};

void* unrolled::allocate(size_t bytes) {
    return allocations++ == failing ? nullptr : std::aligned_alloc(64, bytes);
}

struct Report {
    int cases = 0, failures = 0;
    bool fail_allocations = false;
    char what[200] = "";

    void begin(const char* format, ...) {
        ++cases;
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(what, sizeof what, format, arguments);
        va_end(arguments);
    }
    void fail(const char* why) {
        ++failures;
        std::printf("%s: %s\n", why, what);
    }

    // Runs a kernel. With `fail_allocations` there is first a run for each of its allocations, in which that
    // one fails.
    template <typename F>
    void run(F&& kernel) {
        for (int64_t i = fail_allocations ? 0 : -1;; ++i) {
            allocations = 0, failing = i;
            const Status status = kernel();
            const bool failed = i >= 0 && allocations > i;
            if (status != (failed ? OUT_OF_MEMORY : SUCCESS)) fail("returned another status");
            if (!failed) return;
        }
    }

    void compare(const char* name, const Floats& found, const Doubles& expected) {
        double error = 0, size = 0;
        for (size_t i = 0; i < expected.size(); ++i) {
            const double difference = found[i] == expected[i] ? 0 : std::fabs(found[i] - expected[i]);
            error = difference <= error ? error : difference;  // NaN is an error too
            size = std::isinf(expected[i]) ? size : std::fmax(size, std::fabs(expected[i]));
        }
        if (error <= 2e-5 * (1 + size)) return;
        ++failures;
        std::printf("%s is off by %g of %g: %s\n", name, error, size, what);
    }
    int end() const {
        std::printf("%d cases, %d failures\n", cases, failures);
        return failures != 0;
    }
};
