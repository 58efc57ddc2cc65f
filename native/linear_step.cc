// One token of the linear-attention recurrence. The state is read and written once, which is nearly all the
// work, and the first query reads it while it is in registers.
//
// For each key head, in parallel where the states are large:
// 1. Read the key, the value, the queries and the gates, and apply the feature map.
// 2. S' = diag(a) S + k v^T, and o = S'^T q for the first query head; a is one gate for all features, or one
//    for each. With the delta rule and its rate r, the value is replaced by r (v - S^T diag(a) k).
// 3. o = S'^T q for the other query heads, from the columns of S' just written.
// 4. z' = a z + k, elementwise.
// 5. o is divided by q . z'.
// 6. Write o.
#include "kernels.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

void read_gates(const LinearStep& x, Int head, float* gates) {
    const Int R = x.features;
    if (x.feature_log_decay) read_row(FLOAT32, x.feature_log_decay + head * R, R, gates);
    const Vec gate = broadcast(x.log_decay ? (float)__builtin_exp(x.log_decay[head]) : 1);
    for (Int r = 0; r < R; r += WIDTH) store(gates + r, x.feature_log_decay ? exp(load(gates + r)) : gate);
}

// Phases 2 to 5 for one key head. `gates`, `key` and `queries` have rows of R floats, `value` and `o`
// of M.
void step_head(const LinearStep& x, Int head, const float* gates, const float* key, const float* value,
               Rows queries, Rows o) {
    const Int R = x.features, M = x.values, P = x.heads / x.groups;
    const float* kv = x.kv + head * R * M;
    float* kv_after = x.kv_after + head * R * M;
    // 2. S' = a S + k v^T, and the output of the first query.
    for (Int m = 0; m < M; m += WIDTH) {
        Vec v = load(value + m);
        if (x.rates) {
            Vec held{};
            for (Int r = 0; r < R; ++r)
                held += load_first(kv + r * M + m, M - m) * broadcast(gates[r] * key[r]);
            v = (v - held) * broadcast(x.rates[head]);
        }
        Vec total{};
        for (Int r = 0; r < R; ++r) {
            const Vec s = load_first(kv + r * M + m, M - m) * broadcast(gates[r]) + v * broadcast(key[r]);
            store_first(kv_after + r * M + m, M - m, s);
            total += s * broadcast(queries.data[r]);
        }
        store(o.data + m, total);
        // 3. Outputs of the other queries.
        for (Int p = 1; p < P; ++p) {
            Vec other{};
            for (Int r = 0; r < R; ++r)
                other +=
                    load_first(kv_after + r * M + m, M - m) * broadcast(queries.data[p * queries.row + r]);
            store(o.data + p * o.row + m, other);
        }
    }
    // 4. z' = a z + k.
    if (!x.k_sum) return;
    const float* k_sum = x.k_sum + head * R;
    float* k_sum_after = x.k_sum_after + head * R;
    for (Int r = 0; r < R; ++r) k_sum_after[r] = k_sum[r] * gates[r] + key[r];
    // 5. Division by q . z'.
    for (Int p = 0; p < P && x.normalize; ++p) {
        float divisor = 0;
        for (Int r = 0; r < R; ++r) divisor += queries.data[p * queries.row + r] * k_sum_after[r];
        divide_row(o.data + p * o.row, M, divisor);
    }
}

Status run(const LinearStep& x) {
    const Int R = x.features, M = x.values, P = x.heads / x.groups, type = x.type;
    const Int threads = x.batch * x.groups * R * M < PARALLEL_STATE_FLOATS ? 1 : x.threads;
    return parallel_for(threads, threads, [&](Int part) {
        Workspace memory;
        float *key = memory.floats(round_up(R)), *gates = memory.floats(round_up(R)),
              *value = memory.floats(round_up(M));
        const Rows queries = memory.rows(P, round_up(R)), o = memory.rows(P, round_up(M));
        if (memory.failed()) return OUT_OF_MEMORY;
        const FlushSubnormals flush(x.log_decay || x.feature_log_decay);
        const Int heads = x.batch * x.groups;
        for (Int head = heads * part / threads; head < heads * (part + 1) / threads; ++head) {
            const Int batch = head / x.groups, group = head % x.groups;
            // 1. Key, value, queries and gates.
            read_row(type, address(x.k, type, batch, 0, group), R, key);
            read_row(type, address(x.v, type, batch, 0, group), M, value);
            for (Int p = 0; p < P; ++p)
                read_row(type, address(x.q, type, batch, 0, group * P + p), R,
                         queries.data + p * queries.row);
            make_features(x.feature_map, R, key);
            for (Int p = 0; p < P; ++p) make_features(x.feature_map, R, queries.data + p * queries.row);
            read_gates(x, head, gates);
            // 2 to 5.
            step_head(x, head, gates, key, value, queries, o);
            // 6. Output.
            for (Int p = 0; p < P; ++p)
                write_row(type, o.data + p * o.row, M, (char*)x.o + (head * P + p) * M * size_of(type));
        }
        return SUCCESS;
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

Status EXPORTED(linear_step)(const LinearStep* x) { return UNROLLED_ISA::run(*x); }
