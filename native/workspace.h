// Scratch memory of one task of a kernel. If an allocation fails, the kernel returns OUT_OF_MEMORY, which
// becomes a MemoryError in Python. Kernels never abort, and never throw, since no exception may leave a
// thread of OpenMP.
#pragma once

#include <cstdlib>

#include "arguments.h"
#include "product.h"

namespace unrolled {

// Returns `bytes`, a multiple of 64, aligned to a cache line, for `std::free`; null if the memory is
// exhausted. It is defined outside the kernels, so that the check programs can replace it by one that fails.
void* allocate(size_t bytes);

}  // namespace unrolled

namespace UNROLLED_ISA {

// The states of a whole sequence take more memory than its inputs. So a backward pass keeps the state before
// every span of this many chunks, and computes those between them again.
constexpr int64_t SPAN = 8;

// Arrays that are freed together. Each is aligned to a cache line.
class Workspace {
  public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    ~Workspace() {
        while (n_) std::free(arrays_[--n_]);
    }

    // Null if the memory is exhausted; check `failed` before the first use.
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

    // Whether an allocation has failed. A task allocates all its arrays, checks this once, and then computes.
    bool failed() const { return failed_; }

  private:
    static constexpr int MAX_ARRAYS = 64;  // no kernel has more arrays, whatever the sizes
    void* arrays_[MAX_ARRAYS];
    int n_ = 0;
    bool failed_ = false;
};

}  // namespace UNROLLED_ISA
