// Sliding-window attention, one block of queries of one head at a time: shared by the forward and the
// backward pass. The formulas are those of the block form in Python.
//
// Scores are kept transposed, with a row for each key and a lane for each query. Maxima and sums over keys
// then need no operation across lanes, the queries that read a key are adjacent lanes, and a padded key is a
// row left out.
#pragma once

#include "rows.h"

namespace UNROLLED_ISA {
namespace window {

// Queries of a block, a multiple of every WIDTH.
constexpr Int BLOCK = 64;

// Keys whose scores are computed at once.
constexpr Int MAX_KEYS = 1024;

struct Span {
    Int first, end;

    Int size() const { return max(0, end - first); }
    Span within(Span other) const {
        const Int from = min(max(first, other.first), other.end);
        return {from, max(from, min(end, other.end))};
    }
};

// The keys that a query reads; both bounds grow with the query.
inline Span keys_of(const Window& x, const Sequence& s, Int query) {
    const Int at = query + s.keys - s.queries;
    return Span{at - x.left, at + x.right + 1}.within({0, s.keys});
}

// The keys that some of several queries read.
inline Span keys_of(const Window& x, const Sequence& s, Span some) {
    if (!some.size()) return {0, 0};
    return {keys_of(x, s, some.first).first, keys_of(x, s, some.end - 1).end};
}

// The queries that read a key.
inline Span queries_of(const Window& x, const Sequence& s, Int key) {
    const Int at = key + s.queries - s.keys;
    return Span{at - x.right, at + x.left + 1}.within({0, s.queries});
}

// A segment of the queries for one key head. The tasks of a sequence and a head follow one another in the
// list.
struct WindowTask : Task {
    Span queries, keys;
    float* partial;  // scratch of the backward pass
};

class Tasks {
  public:
    Tasks(const Window& x, Workspace& memory) {
        Int length = 0, n = 0;
        for (Int i = 0; i < x.sequences; ++i) length += sequence_at(x, i).queries;
        const Int reach = min(x.keys, x.left + x.right + 1), per_pair = x.features + x.values;
        threads = threads_for((double)length * (double)(x.heads * reach * per_pair), x.threads);
        // Long enough for four blocks, and short enough for two segments per thread, so that threads finish
        // at about the same time.
        segment_ = threads == 1 ? max(1, length) : max(4 * BLOCK, ceil_div(length * x.groups, 2 * threads));
        segment_ = ceil_div(segment_, BLOCK) * BLOCK;
        for (Int i = 0; i < x.sequences; ++i) n += x.groups * ceil_div(sequence_at(x, i).queries, segment_);
        tasks_ = (WindowTask*)memory.floats(n * (Int)sizeof(WindowTask) / 4);
        if (memory.failed()) return;
        for (Int i = 0; i < x.sequences; ++i)
            for (Int g = 0; g < x.groups; ++g) add(x, sequence_at(x, i), g);
    }

    Int size() const { return size_; }
    WindowTask& operator[](Int i) const { return tasks_[i]; }

    Int threads;

  private:
    void add(const Window& x, const Sequence& s, Int group) {
        for (Int t = 0; t < s.queries; t += segment_) {
            const Span queries{t, min(s.queries, t + segment_)};
            const bool last = queries.end == s.queries;
            tasks_[size_++] = {{s, group, group + 1, t == 0, last}, queries, keys_of(x, s, queries), nullptr};
        }
    }

    WindowTask* tasks_;
    Int segment_, size_ = 0;
};

// A sliding buffer of the keys and values that the current block of queries reads, as contiguous rows of
// floats without the padded keys; in the backward pass with their gradients.
class Keys {
  public:
    Keys(const Window& x, const WindowTask& task, Workspace& memory, bool gradients)
        : x_(x),
          task_(task),
          capacity_(min(task.keys.size(), 2 * (BLOCK + x.left + x.right))),
          next_(task.keys.first) {
        const Int widths[] = {x.features, x.values, x.features, x.values};
        pieces_ = gradients ? 4 : 2;
        for (int i = 0; i < pieces_; ++i) piece_[i] = memory.rows(capacity_, round_up(widths[i]));
        position_ = (int32_t*)memory.floats(capacity_);
    }

    // Rows from `row` on.
    Rows k(Int row = 0) const { return at(0, row); }
    Rows v(Int row = 0) const { return at(1, row); }
    Rows d_k(Int row = 0) const { return at(2, row); }
    Rows d_v(Int row = 0) const { return at(3, row); }

    Int position(Int row) const { return position_[row]; }
    Int capacity() const { return capacity_; }

    // The rows of the keys at `positions`.
    Span rows(Span positions) const { return {row_from(positions.first), row_from(positions.end)}; }

    // Slides to `keys`: drops the rows before them, after calling `leave(row)`, and reads those that are
    // missing.
    template <typename F>
    void move_to(Span keys, F&& leave) {
        while (all.first < all.end && position_[all.first] < keys.first) leave(all.first++);
        next_ = max(next_, keys.first);
        if (all.end + Span{next_, keys.end}.size() > capacity_) move_to_front();
        for (; next_ < keys.end; ++next_) {
            const Sequence& s = task_.sequence;
            if (x_.padding && x_.padding[s.batch * x_.keys + s.first_key + next_]) continue;
            read_row(x_.type, address_of(x_.k, next_), x_.features, k(all.end).data);
            read_row(x_.type, address_of(x_.v, next_), x_.values, v(all.end).data);
            for (int i = 2; i < pieces_; ++i) std::memset(at(i, all.end).data, 0, (size_t)piece_[i].row * 4);
            position_[all.end++] = (int32_t)next_;
        }
    }

    // Prefetches `n` of the keys that will be read next, from the one `from` positions further.
    void prefetch_next(Int from, Int n) const {
        for (Int t = next_ + from; t < min(next_ + from + n, task_.keys.end); ++t) {
            prefetch_row<false>(address_of(x_.k, t), x_.features * size_of(x_.type));
            prefetch_row<false>(address_of(x_.v, t), x_.values * size_of(x_.type));
        }
    }

    Span all{0, 0};

  private:
    Rows at(int piece, Int row) const {
        return {piece_[piece].data + row * piece_[piece].row, piece_[piece].row};
    }

    const char* address_of(const Tensor& tensor, Int position) const {
        const Sequence& s = task_.sequence;
        return address(tensor, x_.type, s.batch, s.first_key + position, task_.first_head);
    }

    // The first row at `position` or after it.
    Int row_from(Int position) const {
        Int low = all.first, high = all.end;
        if (!x_.padding) return low < high ? min(max(position - position_[low], 0) + low, high) : low;
        while (low < high) {
            const Int middle = (low + high) / 2;
            if (position_[middle] < position) low = middle + 1;
            else high = middle;
        }
        return low;
    }

    void move_to_front() {
        const size_t n = (size_t)all.size() * 4;
        for (int i = 0; i < pieces_; ++i)
            std::memmove(piece_[i].data, at(i, all.first).data, n * (size_t)piece_[i].row);
        std::memmove(position_, position_ + all.first, n);
        all = {0, all.size()};
    }

    const Window& x_;
    const WindowTask& task_;
    Int capacity_, next_;
    int pieces_;
    Rows piece_[4];
    int32_t* position_;
};

// Rows of a block of queries and their transpose, with zeros up to a whole vector of queries.
class QueryRows {
  public:
    QueryRows(Int width, Workspace& memory)
        : width_(width),
          rows(memory.rows(BLOCK, round_up(width))),
          transposed(memory.rows(round_up(width), BLOCK)) {}

    float* at(Int i) const { return rows.data + i * rows.row; }

    // Calls `read(i, row)` for each of `n` rows.
    template <typename F>
    void read(Int n, F&& read) const {
        for (Int i = 0; i < n; ++i) read(i, at(i));
        std::memset(at(n), 0, (size_t)((round_up(n) - n) * rows.row) * 4);
        transpose(round_up(n), width_, rows.data, rows.row, transposed);
    }

  private:
    Int width_;

  public:
    Rows rows, transposed;
};

// The rows of keys that some queries of a vector read, and those that all of them read.
struct Visible {
    Span some, all;
};

// The products of a block of queries and the keys that they read, in groups of at most MAX_KEYS.
class Block {
  public:
    Block(const Window& x, const WindowTask& task, const Keys& keys)
        : x_(x), s_(task.sequence), keys_(keys) {}

    // Moves to another block of queries.
    void begin(Span others) {
        queries = others;
        n = others.size();
    }

    // Calls `f` once for each group, which is then `group`.
    template <typename F>
    void for_groups(F&& f) {
        for (Int row = keys_.all.first; row < keys_.all.end; row += MAX_KEYS) {
            group = {row, min(keys_.all.end, row + MAX_KEYS)};
            f();
        }
    }
    Int max_keys() const { return min(MAX_KEYS, keys_.capacity()); }
    Int groups() const { return ceil_div(keys_.all.size(), MAX_KEYS); }

    // scores = keys queries_T for the group: a row for each key, in the lanes of the queries that read it.
    void multiply_keys(Rows keys, Int depth, Rows queries_T, Rows scores) const {
        for_keys([&](Int row, Int rows, Span lanes) {
            const Int first = lanes.first / WIDTH * WIDTH;
            multiply_few_rows(rows, lanes.end - first, depth, {keys.data + row * keys.row, keys.row, 1},
                              {queries_T.data + first, queries_T.row},
                              {scores.data + (row - group.first) * scores.row + first, scores.row}, false);
        });
    }

    // Calls `f(row, rows, lanes)` for each tile of keys of the group, with the queries that read some of
    // them.
    template <typename F>
    void for_keys(F&& f) const {
        for (Int row = group.first; row < group.end; row += TILE_ROWS) {
            const Int rows = min(TILE_ROWS, group.end - row);
            const Span lanes{queries_of(x_, s_, keys_.position(row)).first,
                             queries_of(x_, s_, keys_.position(row + rows - 1)).end};
            f(row, rows, in_block(lanes));
        }
    }

    // Calls `f(i, queries, keys)` for each tile of queries, with the rows of the group that some of them
    // read.
    template <typename F>
    void for_queries(F&& f) const {
        for (Int i = 0; i < n; i += TILE_ROWS) {
            const Int count = min(TILE_ROWS, n - i), first = queries.first + i;
            f(i, count, keys_.rows(keys_of(x_, s_, {first, first + count})).within(group));
        }
    }

    // The rows of the group that the vector of queries at `lane` reads.
    Visible visible(Int lane) const {
        const Span first = keys_of(x_, s_, queries.first + lane);
        const Span last = keys_of(x_, s_, min(queries.first + lane + WIDTH, queries.end) - 1);
        const Span some = keys_.rows({first.first, last.end}).within(group);
        return {some, keys_.rows({last.first, first.end}).within(some)};
    }

    // Calls `f(row, all)` for these rows; `all` says whether every query of the vector reads the row.
    template <typename F>
    static void for_visible(Visible visible, F&& f) {
        for (Int row = visible.some.first; row < visible.all.first; ++row) f(row, false);
        for (Int row = visible.all.first; row < visible.all.end; ++row) f(row, true);
        for (Int row = visible.all.end; row < visible.some.end; ++row) f(row, false);
    }

    // Which queries of the vector at `lane` read the key.
    IntVec readers(Int row, Int lane) const {
        IntVec ahead;  // how far the key is behind the first one that the lane reads
        for (int i = 0; i < WIDTH; ++i) ahead[i] = -i;
        ahead += (int32_t)(keys_.position(row) - (queries.first + lane + s_.keys - s_.queries - x_.left));
        return (ahead >= 0) & (ahead <= (int32_t)(x_.left + x_.right));
    }

    Span queries{0, 0}, group{0, 0};
    Int n = 0;

  private:
    Span in_block(Span q) const {
        const Span found = q.within(queries);
        return {found.first - queries.first, found.end - queries.first};
    }

    const Window& x_;
    const Sequence& s_;
    const Keys& keys_;
};

}  // namespace window
}  // namespace UNROLLED_ISA
