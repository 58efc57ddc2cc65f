// Software prefetch. Consecutive rows of one head are a whole token apart, and such strided rows defeat the
// hardware prefetcher. Requests are spread over the arithmetic, so that the line-fill buffers do not fill up.
#pragma once

#include "simd.h"

namespace UNROLLED_ISA {

constexpr int64_t LINE = 64;  // bytes of a cache line

// Requests a whole row at once, into the second-level cache.
template <bool to_write>
inline void prefetch_row(const void* row, int64_t bytes) {
    asm volatile("");  // GCC drops calls without side effects, and counts a prefetch as none
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char*)row + i, to_write, 2);
}

// Requests the lines of several blocks of rows in equal shares, into the first-level cache. The block added
// last comes first.
class Prefetcher {
  public:
    void clear() { blocks_ = 0, lines_ = 0, offset_ = 0; }

    // `n` rows of `bytes` each, `stride` bytes apart.
    void add(const void* rows, int64_t stride, int64_t n, int64_t bytes) {
        if (blocks_ == MAX_BLOCKS || n <= 0 || bytes <= 0) return;
        block_[blocks_++] = {(const char*)rows, stride, n, bytes};
        lines_ += n * ((bytes + LINE - 1) / LINE);
    }

    // Sets the number of calls of `issue` in which all lines are requested.
    void spread_over(int64_t calls) { lines_per_call_ = calls > 0 ? (lines_ + calls - 1) / calls : lines_; }

    // Requests the next share.
    void issue() {
        int64_t lines = lines_per_call_;
        while (lines > 0 && blocks_) {
            Block& block = block_[blocks_ - 1];
            const char *at = block.rows + offset_, *end = block.rows + block.bytes;
            for (; lines > 0 && at < end; at += LINE, --lines) __builtin_prefetch(at);
            offset_ = at - block.rows;
            if (at < end) return;
            offset_ = 0, block.rows += block.stride;
            if (--block.n == 0) --blocks_;
        }
    }

  private:
    static constexpr int64_t MAX_BLOCKS = 16;
    struct Block {
        const char* rows;
        int64_t stride, n, bytes;
    };
    Block block_[MAX_BLOCKS];
    int64_t blocks_ = 0, lines_ = 0, offset_ = 0, lines_per_call_ = 0;
};

}  // namespace UNROLLED_ISA
