// Linear attention with a decay for every feature, forward. The letters are those of `gla_chunk.h`.
//
// For each sequence and key head, chunk by chunk:
// 1. Read the keys, values, gates and queries, and compute K and W.
// For a few columns of the state at a time, which stay in the first-level cache:
// 2. With rates, replace the values by the corrections of the delta rule.
// 3. O = (F * Q) S + W V for each query head, tile by tile in registers, and write it.
// 4. S' = F_C S + K_C^T V.
#include "gla_delta.h"
#include "kernels.h"

namespace UNROLLED_ISA {
namespace {

// Key heads of one sequence, from chunk to chunk. The rows of all heads of a token are adjacent in memory, so
// several heads go along together: as many as have their states in the second-level cache.
class Heads {
  public:
    Heads(const Gla& x, const GlaOutputs& out, Int groups, Workspace& memory)
        : x_(x),
          out_(out),
          keys_(x, memory),
          queries_(x, memory),
          corrections_(x, memory),
          states_(memory.rows(groups * x.features, round_up(x.values))),
          o_(memory.rows(queries_.heads * GLA_CHUNK, round_up(x.values))) {}

    void run(const Sequence& s, Int first, Int last) {
        const Int R = x_.features, M = x_.values, at = (s.index * x_.groups + first) * R * M;
        for (Int r = 0; r < (last - first) * R; ++r)
            read_row(FLOAT32, x_.state + at + r * M, M, row(states_, r));
        for (Int t = 0; t < s.keys; t += GLA_CHUNK)
            for (Int g = first; g < last; ++g) {
                const Int n = min(GLA_CHUNK, s.keys - t);
                // 1. Keys, values, gates and queries.
                keys_.read(s, s.first_key + t, n, g);
                queries_.read(s, s.first_key + t, g, keys_);
                if (x_.rates) corrections_.read(s, s.first_key + t, g, keys_, queries_);
                if (g + 1 < last) prefetch(s, s.first_key + t, n, g + 1);
                else prefetch(s, s.first_key + t + n, min(GLA_CHUNK, s.keys - t - n), first);
                const Rows state = {row(states_, (g - first) * R), states_.row};
                for (Int m = 0; m < M; m += TILE_VECS * WIDTH) {
                    // 2. Corrections.
                    if (x_.rates) corrections_.solve(keys_, queries_, state, m);
                    // 3. Outputs.
                    for (Int p = 0; p < queries_.heads; ++p) attend(state, p, m);
                    // 4. State.
                    keys_.update(state, m, prefetcher_);
                }
                write((s.batch * x_.queries + s.first_key + t) * x_.heads + g * queries_.heads);
            }
        for (Int r = 0; r < (last - first) * R; ++r)
            write_row(FLOAT32, row(states_, r), M, out_.state + at + r * M);
    }

  private:
    void prefetch(const Sequence& s, Int token, Int n, Int group) {
        prefetcher_.clear();
        queries_.prefetch(prefetcher_, s, token, n, group);
        keys_.prefetch(prefetcher_, s, token, n, group);
        prefetcher_.spread_over(ceil_div(x_.values, TILE_VECS * WIDTH) * ceil_div(x_.features, TILE_ROWS));
    }

    void attend(Rows state, Int p, Int m) {
        for (Int i = 0; i < keys_.n; i += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, keys_.n - i);
            with_tile(rows, x_.values - m, [&](auto tile) __attribute__((always_inline)) {
                tile.add_product({queries_.of(queries_.decayed, p, i), queries_.decayed.row, 1},
                                 state.data + m, state.row, x_.features);
                tile.add_product({queries_.of(queries_.weights, p, i), GLA_CHUNK, 1}, keys_.values.data + m,
                                 keys_.values.row, i + rows);
                tile.write(queries_.of(o_, p, i) + m, o_.row);
            });
        }
    }

    // Writes the outputs; row `first` is that of the first query.
    void write(Int first) const {
        for (Int i = 0; i < keys_.n; ++i)
            for (Int p = 0; p < queries_.heads; ++p)
                write_row(x_.type, queries_.of(o_, p, i), x_.values,
                          (char*)out_.o + (first + i * x_.heads + p) * x_.values * size_of(x_.type));
    }

    const Gla& x_;
    const GlaOutputs& out_;
    DecayedKeys keys_;
    DecayedQueries queries_;
    DecayedCorrections corrections_;
    Prefetcher prefetcher_;
    Rows states_, o_;
};

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(gla_forward)(const Gla* x, const GlaOutputs* out) {
    advise_huge_pages(*x, out->o, x->queries, x->heads, x->values);
    const GlaPlan plan(*x, 1);
    return parallel_for(x->sequences * plan.blocks, plan.threads, [&](Int i) {
        const FlushSubnormals flush(true);
        const Int first = i % plan.blocks * plan.heads, last = min(x->groups, first + plan.heads);
        Workspace memory;
        Heads heads(*x, *out, last - first, memory);
        if (memory.failed()) return OUT_OF_MEMORY;
        heads.run(sequence_at(*x, i / plan.blocks), first, last);
        return SUCCESS;
    });
}
