// Memory of one task of a kernel. An allocation that fails makes the kernel return OUT_OF_MEMORY, which
// Python raises as MemoryError: to abort would end the whole interpreter.
#pragma once

#include <cstdlib>

#include "arguments.h"
#include "product.h"

namespace unrolled {

// `bytes`, a multiple of 64, on a cache line, to be freed by `free`; null if there are none. It is defined
// outside of the kernels, so that the check programs can make it fail.
void* allocate(size_t bytes);

}  // namespace unrolled

namespace UNROLLED_ISA {

// Freed with the task. Each array starts on a cache line.
class Workspace {
  public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    ~Workspace() {
        while (n_) std::free(arrays_[--n_]);
    }

    // Null once memory has run out, of which nothing may be read or written: see `failed`.
    float* floats(int64_t n) {
        void* array = n_ < MAX_ARRAYS ? unrolled::allocate((size_t)(n * 4 + 64) / 64 * 64) : nullptr;
        if (array) arrays_[n_++] = array;
        else failed_ = true;
        return (float*)array;
    }
    float* zeros(int64_t n) {
        float* array = floats(n);
        if (array) std::memset(array, 0, (size_t)n * 4);
        return array;
    }
    Rows rows(int64_t rows, int64_t cols) { return {floats(rows * cols), cols}; }

    // Whether an allocation has failed. Asked once, after all of them and before their first use.
    bool failed() const { return failed_; }

  private:
    static constexpr int MAX_ARRAYS = 32;  // no kernel has more arrays, whatever the sizes
    void* arrays_[MAX_ARRAYS];
    int n_ = 0;
    bool failed_ = false;
};

}  // namespace UNROLLED_ISA
