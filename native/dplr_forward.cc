// The rule of a diagonal plus low rank, forward. The letters are those of `dplr_chunk.h`.
//
// For each sequence and head, chunk by chunk:
// 1. Read both keys, the values, gates, queries and the vectors a, and compute K, B and the weights.
// For a few columns of the state at a time, which stay in the first-level cache:
// 2. Compute the reads U.
// 3. O = (F * Q) S + (Q . K) V + (Q . B) U, tile by tile in registers, and write it.
// 4. S' = F_C S + K_C^T V + B_C^T U.
#include "dplr_chunk.h"
#include "kernels.h"

namespace UNROLLED_ISA {
namespace {

// Heads of one sequence, which go along together from chunk to chunk as in `gla_forward.cc`.
class Heads {
  public:
    Heads(const Dplr& x, const Gla& gla, const GlaOutputs& out, Int heads, Workspace& memory)
        : x_(x),
          out_(out),
          keys_(x, gla, memory),
          queries_(x, x.q, 0, memory),
          reads_(x, memory),
          states_(memory.rows(heads * x.features, round_up(x.values))),
          o_(memory.rows(GLA_CHUNK, round_up(x.values))) {}

    void run(const Sequence& s, Int first, Int last) {
        const Int R = x_.features, M = x_.values, at = (s.index * x_.heads + first) * R * M;
        for (Int r = 0; r < (last - first) * R; ++r)
            read_row(FLOAT32, x_.state + at + r * M, M, row(states_, r));
        for (Int t = 0; t < s.keys; t += GLA_CHUNK)
            for (Int h = first; h < last; ++h) {
                const Int token = s.first_key + t, n = min(GLA_CHUNK, s.keys - t);
                // 1. Keys, values, gates, queries and the vectors a.
                keys_.read(s, token, n, h);
                queries_.read(s, token, h, keys_);
                reads_.read(s, token, h, keys_);
                if (h + 1 < last) prefetch(s, token, n, h + 1);
                else prefetch(s, token + n, min(GLA_CHUNK, s.keys - t - n), first);
                const Rows state = {row(states_, (h - first) * R), states_.row};
                for (Int m = 0; m < M; m += TILE_VECS * WIDTH) {
                    // 2. Reads.
                    reads_.solve(keys_, state, m);
                    // 3. Outputs.
                    attend(state, m);
                    // 4. State.
                    keys_.update(state, m, prefetcher_);
                }
                for (Int i = 0; i < n; ++i)
                    write_row(x_.type, row(o_, i), M,
                              (char*)out_.o +
                                  ((s.batch * x_.tokens + token + i) * x_.heads + h) * M * size_of(x_.type));
            }
        for (Int r = 0; r < (last - first) * R; ++r)
            write_row(FLOAT32, row(states_, r), M, out_.state + at + r * M);
    }

  private:
    void prefetch(const Sequence& s, Int token, Int n, Int head) {
        prefetcher_.clear();
        queries_.prefetch(prefetcher_, s, token, n, head);
        reads_.a.prefetch(prefetcher_, s, token, n, head);
        keys_.prefetch(prefetcher_, s, token, n, head);
        prefetcher_.spread_over(ceil_div(x_.values, TILE_VECS * WIDTH) * ceil_div(x_.features, TILE_ROWS));
    }

    void attend(Rows state, Int m) {
        const Rows reads = keys_.b.values;
        for (Int i = 0; i < keys_.k.n; i += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, keys_.k.n - i);
            with_tile(rows, x_.values - m, [&](auto tile) __attribute__((always_inline)) {
                queries_.add_read(tile, i, rows, state, keys_, m);
                tile.add_product({row(queries_.of_reads, i), GLA_CHUNK, 1}, reads.data + m, reads.row,
                                 i + rows);
                tile.write(row(o_, i) + m, o_.row);
            });
        }
    }

    const Dplr& x_;
    const GlaOutputs& out_;
    KeyPairs keys_;
    Readers queries_;
    Reads reads_;
    Prefetcher prefetcher_;
    Rows states_, o_;
};

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(dplr_forward)(const Dplr* x, const GlaOutputs* out) {
    advise_huge_pages(*x, out->o, x->tokens, x->heads, x->values);
    const Gla gla = without_reads(*x);
    const GlaPlan plan(gla, 1);
    return parallel_for(x->sequences * plan.blocks, plan.threads, [&](Int i) {
        const FlushSubnormals flush(true);
        const Int first = i % plan.blocks * plan.heads, last = min(x->heads, first + plan.heads);
        Workspace memory;
        Heads heads(*x, gla, *out, last - first, memory);
        if (memory.failed()) return OUT_OF_MEMORY;
        heads.run(sequence_at(gla, i / plan.blocks), first, last);
        return SUCCESS;
    });
}
