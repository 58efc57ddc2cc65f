// Draws tokens from logits, as the module `unrolled.generation.sampling` defines it.
#pragma once

#include "arguments.h"

namespace unrolled {

struct Candidate {
    double value;  // a logit, or a probability
    int64_t token;
};

// Number `index` of a random stream, in [0, 1): SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable
// Pseudorandom Number Generators", figure 17) started at `key`.
double random_number(int64_t key, int64_t index);

// Draws a token from `logits [vocabulary]` by a random number; -1 if they define no distribution.
// `candidates` is scratch memory [vocabulary]; `seen` may be null.
int64_t draw(const Sampling& options, int64_t vocabulary, const float* logits, const uint8_t* seen,
             double random, Candidate* candidates);

}  // namespace unrolled
