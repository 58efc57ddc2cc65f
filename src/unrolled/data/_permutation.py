"""A pseudorandom order of n things that is computed place by place and never stored.

A Feistel network permutes the numbers below 4^k, the smallest power of four that is at least n. A number of
2k bits is split into halves (l, r), and a round with the key c maps it to

    (l, r)  ->  (r, l xor (h(r + c) mod 2^k))

with the mixing function h of SplitMix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number
Generators", section 3). A result of n or more is permuted again until it is below n ("cycle walking": Black
and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 3). The result is a permutation of the
numbers below n, and takes fewer than four tries on average.
"""

import numpy as np

ROUNDS = 8
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permuted(places: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Return which of `size` things stand at `places` of the order that belongs to `key`.

    Args:
        places: integers from 0 to size - 1, of any shape.
        size: n, at least 1.
        key: integers of at least 0, such as a seed and the number of an epoch.

    Returns:
        int64 of the same shape as `places`. All places together have each number from 0 to size - 1 once.
    """
    keys = np.random.default_rng(key).integers(2**64, size=ROUNDS, dtype=np.uint64)
    half = max(1, -(-(size - 1).bit_length() // 2))
    found = places.astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        found[outside] = _network(found[outside], np.uint64(half), keys)
        outside = found >= size
    return found.astype(np.int64)


def _network(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    """Permute the numbers of 2 * half bits."""
    low = np.uint64((1 << int(half)) - 1)
    left, right = x >> half, x & low
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & low)
    return (left << half) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit integers; additions and products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
