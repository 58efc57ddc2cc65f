// Rows that are needed soon are asked for while others are being multiplied. They lie too far apart for the
// processor to see them coming, and it stands still when too many are asked for at once.
#pragma once

#include "simd.h"

namespace UNROLLED_ISA {

class Ahead {
  public:
    void clear() { parts_ = 0, lines_ = 0, at_ = 0; }

    // `rows` of `bytes` each, `stride` bytes apart.
    void add(const void* rows, int64_t stride, int64_t n, int64_t bytes) {
        if (parts_ == MOST || n <= 0 || bytes <= 0) return;
        part_[parts_++] = {(const char*)rows, stride, n, bytes};
        lines_ += n * ((bytes + LINE - 1) / LINE);
    }

    // How many times `ask` will be called, over which to spread the asking.
    void over(int64_t asks) { per_ask_ = asks > 0 ? (lines_ + asks - 1) / asks : lines_; }

    // Called before each part of the work.
    void ask() {
        int64_t lines = per_ask_;
        while (lines > 0 && parts_) {
            Part& part = part_[parts_ - 1];
            const char *at = part.rows + at_, *end = part.rows + part.bytes;
            for (; lines > 0 && at < end; at += LINE, --lines) __builtin_prefetch(at);
            at_ = at - part.rows;
            if (at < end) return;
            at_ = 0, part.rows += part.stride;
            if (--part.n == 0) --parts_;
        }
    }

  private:
    static constexpr int64_t LINE = 64, MOST = 16;
    struct Part {
        const char* rows;
        int64_t stride, n, bytes;
    };
    Part part_[MOST];
    int64_t parts_ = 0, lines_ = 0, at_ = 0, per_ask_ = 0;
};

}  // namespace UNROLLED_ISA
