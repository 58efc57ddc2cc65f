// The sequences of a batch or a pack, for kernels of tensors without an axis of heads.
#pragma once

#include "kernels.h"

namespace UNROLLED_ISA {

// A sequence, whose first token is token `first` of the batch's row.
struct Place {
    Int index, batch, first, length;
};

template <typename Problem>
Place place_of(const Problem& x, Int i) {
    if (!x.offsets) return {i, i, 0, x.tokens};
    return {i, 0, x.offsets[i], x.offsets[i + 1] - x.offsets[i]};
}

// The number of tokens of all sequences.
template <typename Problem>
Int all_tokens(const Problem& x) {
    return (x.offsets ? 1 : x.sequences) * x.tokens;
}

}  // namespace UNROLLED_ISA
