// Rotary positions. The kernel is bound by memory, so everything between reading and writing a row is in
// single precision, whatever the type of the tensor.
#include "kernels.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int TOKENS = 64;  // tokens of a task

typedef uint64_t PairVec __attribute__((vector_size(WIDTH * 4)));

// (x_1, x_0, x_3, x_2, ..)
Vec swap_pairs(Vec x) {
    const PairVec pairs = (PairVec)x;
    return (Vec)(pairs >> 32 | pairs << 32);
}

// Factors of x and of x with its pairs swapped, for one token.
void read_angles(const Rotary& x, Int row, Int token, float* own, float* others) {
    const Int at = ((x.shared ? 0 : row) * x.tokens + token) * x.pairs;
    for (Int i = 0; i < x.pairs; ++i) {
        own[2 * i] = own[2 * i + 1] = x.cos[at + i];
        others[2 * i] = -x.sin[at + i];
        others[2 * i + 1] = x.sin[at + i];
    }
}

template <Type type>
Status turn(const Rotary& x, Int row, Int from, Int to) {
    constexpr Int SIZE = size_of(type);
    Workspace memory;
    const Int turned = 2 * x.pairs, width = round_up(x.width);
    float *own = memory.zeros(width), *others = memory.zeros(width);
    float *in = memory.floats(width), *out = memory.floats(width);
    if (memory.failed()) return OUT_OF_MEMORY;
    char* y = (char*)x.y + (row * x.tokens + from) * x.heads * x.width * SIZE;
    for (Int t = from; t < to; ++t) {
        read_angles(x, row, t, own, others);
        for (Int h = 0; h < x.heads; ++h, y += x.width * SIZE) {
            read_row<type>(address(x.x, x.type, row, t, h), x.width, in);
            for (Int i = 0; i < turned; i += WIDTH) {
                const Vec pairs = load(in + i);
                store(out + i, pairs * load(own + i) + swap_pairs(pairs) * load(others + i));
            }
            // The rest is copied: products with a factor of 0 would turn an infinity into NaN.
            std::memcpy(out + turned, in + turned, (size_t)(x.width - turned) * 4);
            write_row<type>(out, x.width, y);
        }
    }
    return SUCCESS;
}

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(rotary)(const Rotary* x) {
    advise_huge_pages(x->y, x->rows * x->tokens * x->heads * x->width * size_of(x->type));
    const Int tasks = ceil_div(x->tokens, TOKENS);
    const double work = (double)(x->rows * x->tokens) * (double)(x->heads * x->width);
    return parallel_for(x->rows * tasks, threads_for(work, x->threads), [&](Int i) {
        const Int from = i % tasks * TOKENS;
        const Int row = i / tasks, to = min(x->tokens, from + TOKENS);
        if (x->type == FLOAT32) return turn<FLOAT32>(*x, row, from, to);
        if (x->type == BFLOAT16) return turn<BFLOAT16>(*x, row, from, to);
        return turn<FLOAT16>(*x, row, from, to);
    });
}
