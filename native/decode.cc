// Runs a program over tokens: the whole model, from token ids to logits, without a return to Python.
//
// 1. Tokens are read in chunks, so that their scratch memory stays in the cache and a matrix is read once per
//    chunk. The tokens of one sequence are in order. A chunk may be a part of a prompt, one token of each of
//    many sequences, or both.
// 2. Threads run the instructions side by side. Instructions of single tokens are shared by tokens, linear
//    layers by tiles, those with a state by heads. A barrier stands before every instruction that reads what
//    another thread may have written.
// 3. The head runs only for tokens whose logits are wanted. What it reads for them is first moved together.
#include <sched.h>

#include "decode_sequences.h"
#include "kernels.h"
#include "packed_product.h"
#include "sampling.h"

#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
#endif

namespace UNROLLED_ISA {
namespace {

using unrolled::Candidate;

#if defined(_OPENMP)
Int thread_number() { return omp_get_thread_num(); }
Int thread_count() { return omp_get_num_threads(); }
#else
Int thread_number() { return 0; }
Int thread_count() { return 1; }
#endif

constexpr Int CHUNK = 64;

// Lets threads wait for each other for a short time.
class Barrier {
  public:
    void wait(Int threads) {
        if (threads == 1) return;
        const Int round = __atomic_load_n(&round_, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(&waiting_, 1, __ATOMIC_ACQ_REL) == threads) {
            __atomic_store_n(&waiting_, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&round_, round + 1, __ATOMIC_RELEASE);
            return;
        }
        for (Int spins = 0; __atomic_load_n(&round_, __ATOMIC_ACQUIRE) == round; ++spins)
            if (spins > SPINS) sched_yield();
    }

  private:
    static constexpr Int SPINS = 2000;
    Int waiting_ = 0, round_ = 0;
};

// What the threads share.
struct Run {
    const Program& program;
    float* scratch;
    Int row;  // from the scratch memory of one token to that of the next
    Barrier barrier;
};

void run_on_token(const Instruction& x, const TokenRow& t) {
    switch (x.operation) {
        case EMBED:
            embed(x, t);
            break;
        case ADD_POSITIONS:
            for (Int i = 0; i < x.n; ++i) t.to(x)[i] += x.weights[t.position * x.n + i];
            break;
        case ADD_SINUSOIDS:
            add_sinusoids(x, t);
            break;
        case ANGLES:
            angles(x, t);
            break;
        case NORMALIZE:
            normalize(x, t);
            break;
        case LINEAR_BY_HEAD:
            linear_by_head(x, t);
            break;
        case APPLY:
            apply(x, t);
            break;
        case ADD:
            add(x, t);
            break;
        case SCALE_HEADS:
            scale_heads(x, t);
            break;
        case ROTATE:
            rotate(x, t);
            break;
        case FEATURES:
            features(x, t);
            break;
        case MIXTURE:
            mixture(x, t);
            break;
    }
}

bool of_one_token(const Instruction& x) { return x.operation != LINEAR_LAYER && x.operation < CONVOLVE; }

// One thread of a run, and its own memory.
class Worker {
  public:
    // For up to `rows` tokens at a time.
    Worker(Run& run, Int part, Int parts, Int rows, Workspace& memory)
        : run_(run),
          part_(part),
          parts_(parts),
          packer_(rows, run.program.widest, memory),
          candidates_((Candidate*)memory.floats(run.program.vocabulary * (Int)sizeof(Candidate) / 4)) {}

    void wait() { run_.barrier.wait(parts_); }

    // Reads tokens at `positions`.
    void read(const Tokens& tokens, const Int* positions) {
        for (Int i = 0; i < tokens.n; i += CHUNK)
            read_chunk({min(CHUNK, tokens.n - i), tokens.token + i, tokens.sequence + i, tokens.place + i,
                        tokens.logits},
                       positions + i);
    }

    // Draws a token, number `step` of this call, for this thread's share of the rows; notes which rows end.
    void draw(const Continuation& c, Int step) {
        const Int V = run_.program.vocabulary;
        for (Int i = part_; i < c.rows; i += parts_) {
            if (c.status[i] != ACTIVE) continue;
            const Row& row = c.row[i];
            const Int n = c.length[i];
            if (row.told) std::memcpy(row.told + step * V, c.logits + i * V, (size_t)V * 4);
            const Int token = unrolled::draw(row.sampling, V, c.logits + i * V, row.seen,
                                             unrolled::random_number(row.key, n), candidates_);
            if (token < 0) {
                c.status[i] = NO_DISTRIBUTION;
                continue;
            }
            row.tokens[n] = token;
            c.length[i] = n + 1;
            if (row.seen) row.seen[token] = 1;
            if (n + 1 == row.limit || stopped(row, n + 1)) c.status[i] = ENDED;
        }
    }

  private:
    void read_chunk(const Tokens& tokens, const Int* positions) {
        const Program& p = run_.program;
        const Int head = p.instructions - p.head;
        wait();  // for threads that still read the results of the last chunk
        run_range(0, head, tokens, positions);
        wait();
        Int wanted = 0;
        for (Int i = 0; i < tokens.n; ++i) {
            if (tokens.place[i] < 0) continue;
            if (part_ == 0 && wanted < i)
                std::memcpy(at(wanted) + p.hidden, at(i) + p.hidden, (size_t)p.hidden_width * 4);
            ++wanted;
        }
        if (!wanted) return;
        wait();
        Tokens heads = tokens;
        heads.n = wanted;
        run_range(head, p.instructions, heads, positions);
        wait();
        for (Int i = 0, row = 0; i < tokens.n && part_ == 0; ++i)
            if (tokens.place[i] >= 0)
                std::memcpy(tokens.logits + tokens.place[i] * p.vocabulary, at(row++) + p.logits,
                            (size_t)p.vocabulary * 4);
    }

    void run_range(Int first, Int last, const Tokens& tokens, const Int* positions) {
        for (Int i = first; i < last; ++i) {
            const Instruction& x = run_.program.instruction[i];
            if (i > first && !(of_one_token(x) && of_one_token(run_.program.instruction[i - 1]))) wait();
            if (of_one_token(x))
                for (Int t = part_; t < tokens.n; t += parts_)
                    run_on_token(x, {at(t), tokens.token[t], positions[t]});
            else if (x.operation == LINEAR_LAYER) multiply(x, tokens.n);
            else run_on_sequences(x, tokens, positions);
        }
    }

    void multiply(const Instruction& x, Int n) {
        const Share tiles = share_of(ceil_div(x.layer.outputs, TILE), part_, parts_);
        if (tiles.first == tiles.last) return;
        const bool matrix_unit = on_matrix_unit(x.layer, n, run_.program.steady);
        const PackedRows rows = packer_.pack(x.layer, at(0) + x.first, run_.row, n, matrix_unit);
        multiply_tiles(x.layer, tiles.first, tiles.last, rows, n, matrix_unit, at(0) + x.to, run_.row,
                       weights_after(x));
    }

    // The weights that this thread multiplies by next, after an instruction.
    const void* weights_after(const Instruction& x) const {
        const Instruction *begin = run_.program.instruction, *end = begin + run_.program.instructions,
                          *i = &x + 1;
        while (i < end && i->operation != LINEAR_LAYER) ++i;
        if (i == end)
            for (i = begin; i->operation != LINEAR_LAYER;) ++i;
        const Share tiles = share_of(ceil_div(i->layer.outputs, TILE), part_, parts_);
        return (const char*)i->layer.weights + tiles.first * tile_bytes(i->layer);
    }

    void run_on_sequences(const Instruction& x, const Tokens& tokens, const Int* positions) {
        Share share = share_of(x.groups, part_, parts_);
        const bool by_channel = x.operation == CONVOLVE || x.operation == AVERAGE || x.operation == SCAN;
        if (by_channel) {
            share = share_of(ceil_div(x.n, TILE), part_, parts_);
            share = {share.first * TILE, min(share.last * TILE, x.n)};
        }
        for (Int i = 0; i < tokens.n;) {
            SequenceRow some[QUERIES];
            const Int n = consecutive(x, tokens, i);
            for (Int k = 0; k < n; ++k) some[k] = sequence_row(tokens, positions, i + k);
            i += n;
            if (by_channel) {
                if (x.operation == CONVOLVE) convolve(x, some[0], share);
                else if (x.operation == AVERAGE) average(x, some[0], share);
                else scan(x, some[0], share);
                continue;
            }
            for (Int group = share.first; group < share.last; ++group)
                if (x.operation == RECUR) recur(x, some[0], group);
                else attend(x, some, n, group);
        }
    }

    // How many tokens from `first` on an instruction takes at once.
    static Int consecutive(const Instruction& x, const Tokens& tokens, Int first) {
        if (x.operation != ATTEND || x.window) return 1;
        Int n = 1;
        while (n < QUERIES && first + n < tokens.n && tokens.sequence[first + n] == tokens.sequence[first])
            ++n;
        return n;
    }

    SequenceRow sequence_row(const Tokens& tokens, const Int* positions, Int i) const {
        const SequenceState& s = run_.program.sequence[tokens.sequence[i]];
        return {{at(i), tokens.token[i], positions[i]}, s.state, s.cache, s.capacity};
    }

    // Whether n tokens of a row end with one of the sequences that end it.
    static bool stopped(const Row& row, Int n) {
        for (Int i = 0, begin = 0; i < row.stops; begin = row.stop_end[i++]) {
            const Int length = row.stop_end[i] - begin;
            if (length <= n &&
                std::memcmp(row.tokens + n - length, row.stop + begin, (size_t)length * sizeof(Int)) == 0)
                return true;
        }
        return false;
    }

    float* at(Int i) const { return run_.scratch + i * run_.row; }

    Run& run_;
    Int part_, parts_;
    RowPacker packer_;
    Candidate* candidates_;
};

// Calls `work(worker, thread)` on each thread, for at most `most` tokens at a time.
template <typename F>
Status on_threads(const Program& p, Int most, F&& work) {
    Workspace memory;
    // An odd number of cache lines apart, so that the rows do not compete for the same sets.
    const Int row = ceil_div(p.width, 32) * 32 + 16;
    const Int rows = min(most, CHUNK);
    Run run{p, memory.floats(rows * row), row, {}};
    if (memory.failed()) return OUT_OF_MEMORY;
    int32_t status = SUCCESS;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
    {
        const Int part = thread_number(), parts = thread_count();
        Workspace own;
        Worker worker(run, part, parts, rows, own);
        if (own.failed()) __atomic_store_n(&status, OUT_OF_MEMORY, __ATOMIC_RELAXED);
        worker.wait();
        if (__atomic_load_n(&status, __ATOMIC_RELAXED) == SUCCESS) work(worker, part);
    }
    return (Status)status;
}

// Counts a token of a sequence: returns its position.
Int advance(const Program& p, Int sequence) { return (*p.sequence[sequence].position)++; }

Status read(const Program& p, const Tokens& tokens) {
    Workspace memory;
    Int* positions = (Int*)memory.floats(2 * tokens.n);
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int i = 0; i < tokens.n; ++i) positions[i] = advance(p, tokens.sequence[i]);
    return on_threads(p, tokens.n, [&](Worker& worker, Int) { worker.read(tokens, positions); });
}

Status continue_all(const Program& p, const Continuation& c) {
    Workspace memory;
    Int *drawn = (Int*)memory.floats(2 * c.rows), *rows = (Int*)memory.floats(2 * c.rows),
        *positions = (Int*)memory.floats(2 * c.rows);
    if (memory.failed()) return OUT_OF_MEMORY;
    Tokens tokens{0, drawn, rows, rows, c.logits};
    return on_threads(p, c.rows, [&](Worker& worker, Int part) {
        for (Int step = 0; step < c.most; ++step) {
            worker.wait();
            worker.draw(c, step);
            worker.wait();
            if (part == 0) {
                tokens.n = 0;
                for (Int row = 0; row < c.rows; ++row) {
                    if (c.status[row] == ACTIVE && *p.sequence[row].position == p.positions)
                        c.status[row] = NO_POSITION;
                    if (c.status[row] != ACTIVE) continue;
                    drawn[tokens.n] = c.row[row].tokens[c.length[row] - 1];
                    positions[tokens.n] = advance(p, row);
                    rows[tokens.n++] = row;
                }
            }
            worker.wait();
            if (!tokens.n) return;
            worker.read(tokens, positions);
        }
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(decode)(const Program* p, const Tokens* tokens) { return UNROLLED_ISA::read(*p, *tokens); }

Status EXPORTED(decode_on)(const Program* p, const Continuation* c) {
    return UNROLLED_ISA::continue_all(*p, *c);
}
