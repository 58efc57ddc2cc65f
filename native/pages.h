// Large results lie in memory that is often new to the process, and getting it page by page takes longer than
// filling it.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace UNROLLED_ISA {

// Asks for the huge pages that lie wholly in `bytes` from `at` on, all of which will be written. Memory in
// use already stays as it is.
inline void advise_huge_pages([[maybe_unused]] const void* at, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    const uintptr_t first = ((uintptr_t)at + PAGE - 1) / PAGE * PAGE,
                    end = ((uintptr_t)at + bytes) / PAGE * PAGE;
    if (first < end) madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
}

}  // namespace UNROLLED_ISA
