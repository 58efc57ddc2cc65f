// The limit of the machine: the rate of the register tile of `product.h` on matrices in the first-level
// cache.
#include <ctime>

#include "kernels.h"
#include "product.h"

double EXPORTED(fma_peak)(double seconds) {
    using namespace UNROLLED_ISA;
    constexpr int64_t DEPTH = 64, REPEATS = 256;
    static float left[TILE_ROWS * DEPTH], right[DEPTH * TILE_VECS * WIDTH],
        out[TILE_ROWS * TILE_VECS * WIDTH];
    double best = 0, spent = 0;
    while (spent < seconds) {
        timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int64_t i = 0; i < REPEATS; ++i) {
            Tile<TILE_ROWS, TILE_VECS> tile;
            tile.add_product({left, DEPTH, 1}, right, TILE_VECS * WIDTH, DEPTH);
            tile.write(out, TILE_VECS * WIDTH);
            asm volatile("" : : "r"(out) : "memory");  // the compiler may not drop a product
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double took =
            (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
        const double rate = 2.0 * TILE_ROWS * TILE_VECS * WIDTH * DEPTH * REPEATS / took;
        if (rate > best) best = rate;
        spent += took;
    }
    return best;
}
