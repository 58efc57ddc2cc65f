// Heads scaled to a length, forward and backward:
//
//     u = f(x),   n = u * length / sqrt(|u|^2 + eps),   y = n * weight * g(gate)
//
// f is the identity or silu, g is silu or the logistic function. Weight and gate may be absent. With
// `gate_first`, g(gate) is a factor of u and not of y. The kernel is bound by memory, so everything between
// reading and writing a head is in single precision, whatever the types of the tensors.
#include "functions.h"
#include "kernels.h"
#include "product.h"
#include "rows.h"

namespace UNROLLED_ISA {
namespace {

constexpr Int TOKENS = 64;  // tokens of a task, over which the gradient of the weight is summed in floats

// The vector at element i of a row of `n` elements, of which only those within the row exist.
template <Type type>
inline Vec load_part(const void* row, Int i, Int n) {
    const char* at = (const char*)row + i * size_of(type);
    if (__builtin_expect(n - i >= WIDTH, 1)) return load_as<type>(at);
    float lanes[WIDTH] = {};
    read_row<type>(at, n - i, lanes);
    return load(lanes);
}

template <Type type>
inline void store_part(Vec x, void* row, Int i, Int n) {
    char* at = (char*)row + i * size_of(type);
    if (__builtin_expect(n - i >= WIDTH, 1)) return store_as<type>(at, x);
    float lanes[WIDTH];
    store(lanes, x);
    write_row<type>(lanes, n - i, at);
}

// Tokens [from, to) of one row.
struct Span {
    Int row, from, to;
};

// One head of a token: where its parts lie in memory.
struct Head {
    Head(const HeadScale& problem, const Span& s, Int token, Int head)
        : x(address(problem.x, problem.type, s.row, token, head)),
          gate(problem.gate.data ? address(problem.gate, problem.gate_type, s.row, token, head) : nullptr),
          weight(problem.weight ? problem.weight + head * problem.width : nullptr),
          place(((s.row * problem.tokens + token) * problem.heads + head) * problem.width) {}

    void* in(const void* tensor, int32_t type) const { return (char*)tensor + place * size_of(type); }

    const char *x, *gate;
    const float* weight;
    Int place;  // of its first element in a contiguous tensor
};

// Reads u and, where there are places for them, its derivatives by x and by the gate. Returns |u|^2 + eps.
template <Type type, Type gate_type>
inline float read_head(const HeadScale& x, const Head& head, float* u, float* by_x, float* by_gate) {
    Vec total{};
    for (Int i = 0; i < x.width; i += WIDTH) {
        Vec value = load_part<type>(head.x, i, x.width), slope = broadcast(1);
        if (x.activation) {
            const Slope f = with_slope(SILU, value);
            value = f.value, slope = f.slope;
        }
        if (x.gate_first) {
            const Slope g = with_slope(x.gate_function, load_part<gate_type>(head.gate, i, x.width));
            if (by_gate) store(by_gate + i, value * g.slope);
            value *= g.value, slope *= g.value;
        }
        if (by_x) store(by_x + i, slope);
        store(u + i, value);
        total += value * value;
    }
    return sum(total) + x.eps;
}

template <Type type, Type gate_type>
Status forward(const HeadScale& x, float* y, const Span& s) {
    Workspace memory;
    float* u = memory.floats(round_up(x.width));
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int t = s.from; t < s.to; ++t)
        for (Int h = 0; h < x.heads; ++h) {
            const Head head(x, s, t, h);
            const float square = read_head<type, gate_type>(x, head, u, nullptr, nullptr);
            const Vec factor = broadcast(x.length / __builtin_sqrtf(square));
            for (Int i = 0; i < x.width; i += WIDTH) {
                Vec n = load(u + i) * factor;
                if (head.weight) n *= load_first(head.weight + i, x.width - i);
                if (head.gate && !x.gate_first)
                    n *= with_slope(x.gate_function, load_part<gate_type>(head.gate, i, x.width)).value;
                store_part<FLOAT32>(n, head.in(y, FLOAT32), i, x.width);
            }
        }
    return SUCCESS;
}

// `d_weight [heads, width]` is the gradient of the weight from this span.
template <Type type, Type gate_type>
Status backward(const HeadScale& x, const HeadScaleGradients& out, const Span& s, double* d_weight) {
    Workspace memory;
    const Int width = round_up(x.width);
    float *u = memory.floats(width), *by_x = memory.floats(width), *by_gate = memory.floats(width),
          *d_n = memory.floats(width);
    const Rows sums = {memory.zeros(x.weight ? x.heads * width : 0), width};
    if (memory.failed()) return OUT_OF_MEMORY;
    for (Int t = s.from; t < s.to; ++t)
        for (Int h = 0; h < x.heads; ++h) {
            const Head head(x, s, t, h);
            const float square = read_head<type, gate_type>(x, head, u, by_x, by_gate);
            const Vec factor = broadcast(x.length / __builtin_sqrtf(square));
            Vec total{};  // d_n . u
            for (Int i = 0; i < x.width; i += WIDTH) {
                const Vec n = load(u + i) * factor;
                Vec d = load_part<FLOAT32>(head.in(out.y, FLOAT32), i, x.width), weight = broadcast(1);
                if (head.weight) weight = load_first(head.weight + i, x.width - i);
                if (head.gate && !x.gate_first) {
                    const Slope g = with_slope(x.gate_function, load_part<gate_type>(head.gate, i, x.width));
                    store_part<gate_type>(d * n * weight * g.slope, head.in(out.d_gate, gate_type), i,
                                          x.width);
                    d *= g.value;
                }
                if (head.weight) {
                    float* sum = row(sums, h) + i;
                    store(sum, load(sum) + d * n);
                    d *= weight;
                }
                store(d_n + i, d);
                total += d * load(u + i);
            }
            // A change along u only changes its length, which the norm takes away.
            const Vec along = broadcast(sum(total) / square);
            for (Int i = 0; i < x.width; i += WIDTH) {
                const Vec d_u = factor * (load(d_n + i) - load(u + i) * along);
                if (x.gate_first)
                    store_part<gate_type>(d_u * load(by_gate + i), head.in(out.d_gate, gate_type), i,
                                          x.width);
                store_part<type>(d_u * load(by_x + i), head.in(out.d_x, type), i, x.width);
            }
        }
    for (Int h = 0; x.weight && h < x.heads; ++h)
        for (Int i = 0; i < x.width; ++i) d_weight[h * x.width + i] = row(sums, h)[i];
    return SUCCESS;
}

// Calls `f` with a type as a `Count`.
template <typename F>
Status with_type(int32_t type, F&& f) {
    if (type == BFLOAT16) return f(Count<BFLOAT16>());
    if (type == FLOAT16) return f(Count<FLOAT16>());
    return f(Count<FLOAT32>());
}

template <typename F>
Status with_types(const HeadScale& x, F&& f) {
    return with_type(x.type, [&](auto type) {
        return with_type(x.gate_type, [&](auto gate_type) { return f(type, gate_type); });
    });
}

// Calls `f` with the index and the tokens of every task.
template <typename F>
Status for_spans(const HeadScale& x, F&& f) {
    const Int tasks = ceil_div(x.tokens, TOKENS);
    const double work = (double)(x.rows * x.tokens) * (double)(x.heads * x.width);
    return parallel_for(x.rows * tasks, threads_for(work, x.threads), [&](Int i) {
        const Int from = i % tasks * TOKENS;
        return f(i, Span{i / tasks, from, min(x.tokens, from + TOKENS)});
    });
}

}  // namespace
}  // namespace UNROLLED_ISA

using namespace UNROLLED_ISA;

Status EXPORTED(head_scale)(const HeadScale* x, const HeadScaleOutputs* out) {
    advise_huge_pages(out->y, x->rows * x->tokens * x->heads * x->width * 4);
    return for_spans(*x, [&](Int, const Span& s) {
        return with_types(*x, [&](auto type, auto gate_type) {
            return forward<(Type) decltype(type)::value, (Type) decltype(gate_type)::value>(*x, out->y, s);
        });
    });
}

Status EXPORTED(head_scale_backward)(const HeadScale* x, const HeadScaleGradients* out) {
    advise_huge_pages(out->d_x, x->rows * x->tokens * x->heads * x->width * size_of(x->type));
    const Int n = x->weight ? x->heads * x->width : 0, spans = x->rows * ceil_div(x->tokens, TOKENS);
    Workspace memory;
    double* parts = (double*)memory.zeros(2 * spans * n);
    if (memory.failed()) return OUT_OF_MEMORY;
    const Status status = for_spans(*x, [&](Int i, const Span& s) {
        return with_types(*x, [&](auto type, auto gate_type) {
            return backward<(Type) decltype(type)::value, (Type) decltype(gate_type)::value>(*x, *out, s,
                                                                                             parts + i * n);
        });
    });
    if (status != SUCCESS) return status;
    for (Int j = 0; j < n; ++j) {
        double total = 0;
        for (Int i = 0; i < spans; ++i) total += parts[i * n + j];
        out->d_weight[j] = (float)total;
    }
    return SUCCESS;
}
