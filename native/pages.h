// Large results often lie in memory that is new to the process, where page faults of 4 KiB each take longer
// than writing the results. Huge pages of 2 MiB make them rare.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace UNROLLED_ISA {

// Advises the kernel of Linux to back `bytes` from `at` on, all of which will be written, by huge pages.
// Pages that are mapped already stay as they are.
inline void advise_huge_pages([[maybe_unused]] const void* at, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    const uintptr_t first = ((uintptr_t)at + PAGE - 1) / PAGE * PAGE,
                    end = ((uintptr_t)at + bytes) / PAGE * PAGE;
    if (first < end) madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
}

}  // namespace UNROLLED_ISA
