"""Products with U = W_0 (x) ... (x) W_{F-1}, the Kronecker product of square factors, never materialised.

All functions take several U at once, one for each group g, and vectors of length N = n_0 ... n_{F-1}.
"""

import math
from collections.abc import Sequence

from torch import Tensor

FUSED = 16
"""Neighbouring factors are multiplied up to this size: one product of this size costs less than four."""


def factor_sizes(size: int, factors: Sequence[int] | None) -> tuple[int, ...]:
    """Check the sizes of the factors, whose product must be `size`; by default its primes, the largest first.

    Primes have the smallest sum of squares, and so the fewest parameters.

    Raises:
        ValueError: the factors do not multiply to `size`, or one is below 1.
    """
    if factors is None:
        return _primes(size)
    if not isinstance(factors, Sequence):
        raise ValueError(f"factors is {factors!r}, but must be a sequence of whole numbers")
    sizes = tuple(factors)
    if not sizes or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
        raise ValueError(f"factors is {list(sizes)}, but must be whole numbers of at least 1")
    if math.prod(sizes) != size:
        raise ValueError(
            f"factors is {list(sizes)}, which multiply to {math.prod(sizes)}, but must multiply to {size}"
        )
    return sizes


def _primes(size: int) -> tuple[int, ...]:
    found, p = [], 2
    while size > 1:
        while size % p == 0:
            found.append(p)
            size //= p
        p = p + 1 if p * p <= size else size
    return tuple(reversed(found)) or (1,)


def fuse(factors: Sequence[Tensor]) -> list[Tensor]:
    """Multiply neighbours `[G,n,n]` up to a width of `FUSED`: the same U with fewer factors."""
    fused = [factors[0]]
    for W in factors[1:]:
        if fused[-1].shape[-1] * W.shape[-1] <= FUSED:
            fused[-1] = kron(fused[-1], W)
        else:
            fused.append(W)
    return fused


def kron(a: Tensor, b: Tensor) -> Tensor:
    """`torch.kron` of each group: `[G,m,m]` and `[G,n,n]` to `[G,m n,m n]`."""
    product = a[:, :, None, :, None] * b[:, None, :, None, :]
    return product.flatten(3, 4).flatten(1, 2)


def matvec(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """U x for vectors `x [G,B,N]`, in time O(G B N sum_f n_f).

    (A (x) B) vec(X) = vec(A X B^T), where vec reads X row by row. Each factor is contracted with the first
    axis, and the result becomes the last axis, so that the order is restored after the last factor.
    """
    G, B, N = x.shape
    for W in factors:
        n = W.shape[-1]
        x = x.reshape(G, B, n, N // n).transpose(2, 3).reshape(G, B * (N // n), n) @ W.mT
    return x.reshape(G, B, N)
