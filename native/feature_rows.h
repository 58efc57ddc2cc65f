// Queries or keys of one head as features: used in place, mapped elementwise, or as positive random features
//
//     phi(x) = exp(W y - |y|^2 / 2 - shift),    y = x / D^(1/4)
//
// Random features are wider than x, so they exist for one chunk at a time only, and are computed again where
// they are needed again.
#pragma once

#include "rows.h"

namespace UNROLLED_ISA {

// The width of q and k as given.
inline Int input_width(const Linear& x) { return x.rows ? x.width : x.features; }

enum class Side { QUERIES, KEYS };

class FeatureRows {
  public:
    FeatureRows(const Linear& x, Side side, Int most, Workspace& memory, bool copy)
        : x_(x), side_(side), inputs_(x.type, input_width(x), most, memory, copy || x.rows, x.feature_map) {
        if (!x.rows) return;
        features_ = memory.rows(most, round_up(x.features));
        d_inputs_ = memory.rows(TILE_ROWS, round_up(x.width));
        scale_ = 1 / __builtin_sqrtf(__builtin_sqrtf((float)x.width));
    }

    // The features of tokens [token, token + n). They stay in place until the next call.
    Rows read(Int batch, Int token, Int head, Int n) {
        if (!x_.rows) return features_ = inputs_.read(tensor(), batch, token, head, n);
        project(batch, token, head, n);
        for (Int i = 0; i < n; ++i) {
            float* at = row(features_, i);
            const float shift = side_ == Side::QUERIES
                                    ? largest(at)
                                    : half_square(i) + x_.key_shift[key_row(batch, token + i, head)];
            for (Int r = 0; r < x_.features; r += WIDTH) {
                const Vec exponent = load(at + r) - broadcast(shift);  // above 0 by rounding only
                store(at + r, exp_of_negative(select(exponent > Vec{}, Vec{}, exponent)));
            }
            for (Int r = x_.features; r < round_up(x_.features); ++r) at[r] = 0;
        }
        return features_;
    }

    // Writes the largest exponent of each key, without a shift.
    void peaks(Int batch, Int token, Int head, Int n, float* out) {
        project(batch, token, head, n);
        for (Int i = 0; i < n; ++i)
            out[key_row(batch, token + i, head)] = largest(row(features_, i)) - half_square(i);
    }

    // Turns the gradients of the features read last into those of their inputs, and writes row i to `at(i)`.
    // `gradient` is overwritten.
    template <typename F>
    void write_gradients(Int n, Rows gradient, F&& at) const {
        if (x_.rows) {
            for (Int i = 0; i < n; i += TILE_ROWS)
                write_projected_gradients(i, min(TILE_ROWS, n - i), gradient, at);
            return;
        }
        for (Int i = 0; i < n; ++i) {
            unmap_gradient(x_.feature_map, x_.features, row(features_, i), row(gradient, i));
            write_row(x_.type, row(gradient, i), x_.features, at(i));
        }
    }

  private:
    const Tensor& tensor() const { return side_ == Side::QUERIES ? x_.q : x_.k; }

    Int key_row(Int batch, Int token, Int head) const { return (batch * x_.keys + token) * x_.groups + head; }

    // W y for each token.
    void project(Int batch, Int token, Int head, Int n) {
        const Int R = x_.features, D = x_.width, padded = padded_row(R);
        const Int group = side_ == Side::QUERIES ? head / (x_.heads / x_.groups) : head;
        row_head_ = x_.row_heads == 1 ? 0 : group;
        y_ = inputs_.read(tensor(), batch, token, head, n);
        for (Int i = 0; i < n; ++i) scale_row(row(y_, i), D, scale_);
        const Rows transposed = {const_cast<float*>(x_.transposed_rows) + row_head_ * D * padded, padded};
        for (Int i = 0; i < n; i += TILE_ROWS)
            multiply_few_rows(min(TILE_ROWS, n - i), R, D, {row(y_, i), y_.row, 1}, transposed,
                              {row(features_, i), features_.row}, false);
    }

    float half_square(Int i) const { return dot(row(y_, i), row(y_, i), x_.width) / 2; }

    float largest(const float* at) const {
        const Int whole = x_.features / WIDTH * WIDTH;
        Vec most = broadcast(-__FLT_MAX__);
        for (Int r = 0; r < whole; r += WIDTH) most = max(load(at + r), most);
        float found = largest_lane(most);
        for (Int r = whole; r < x_.features; ++r) found = at[r] > found ? at[r] : found;
        return found;
    }

    // With g = dphi phi, the gradient of the exponents: dx = (W^T g - y sum(g)) / D^(1/4).
    template <typename F>
    void write_projected_gradients(Int first, Int n, Rows gradient, F&& at) const {
        const Int R = x_.features, D = x_.width, padded = padded_row(D);
        float totals[TILE_ROWS];
        for (Int i = 0; i < n; ++i) {
            float *g = row(gradient, first + i), *phi = row(features_, first + i);
            Vec total{};
            for (Int r = 0; r < R; r += WIDTH) {
                const Vec product = load(g + r) * load(phi + r);
                store(g + r, product);
                total += product;
            }
            totals[i] = sum(total);
        }
        const Rows weights = {const_cast<float*>(x_.rows) + row_head_ * R * padded, padded};
        multiply_few_rows(n, D, R, {row(gradient, first), gradient.row, 1}, weights, d_inputs_, false);
        for (Int i = 0; i < n; ++i) {
            float *d = row(d_inputs_, i), *y = row(y_, first + i);
            for (Int c = 0; c < D; c += WIDTH)
                store(d + c, (load(d + c) - load(y + c) * broadcast(totals[i])) * broadcast(scale_));
            write_row(x_.type, d, D, at(first + i));
        }
    }

    // Rows of W and of its transpose are padded, so that they can be read in whole vectors.
    static Int padded_row(Int n) { return ceil_div(n, 16) * 16; }

    const Linear& x_;
    const Side side_;
    HeadRows inputs_;
    Rows features_{}, y_{}, d_inputs_{};
    Int row_head_ = 0;
    float scale_ = 1;
};

}  // namespace UNROLLED_ISA
