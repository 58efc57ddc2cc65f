"""Maps whose kernel is a polynomial of the product q . k, packed: each pair of coordinates occurs once."""

import torch
from torch import Tensor

from unrolled.ops.feature_maps.base import FeatureMap
from unrolled.ops.options import check_finite


def pairs(x: Tensor) -> Tensor:
    """x_i^2 and sqrt(2) x_i x_j for i < j, whose kernel is (q . k)^2: `[..., D]` -> `[..., D(D+1)/2]`."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    factor: Tensor = (2 - (i == j).to(x.dtype)).sqrt()
    return factor * x[..., i] * x[..., j]


class Polynomial(FeatureMap):
    """phi(q) . phi(k) = (q . k + offset)^2, the kernel of degree 2 of arXiv 2006.16236, section 3.2.1.

    Packed: [offset, sqrt(2 offset) x_i, x_i^2, sqrt(2) x_i x_j for i < j], so R = 1 + D + D(D+1)/2 rather
    than 1 + D + D^2. This is cheaper than softmax only where the length exceeds R. The kernel is 0 at
    q . k = -offset. If all products of a query are close to -offset, its output is a quotient of two small
    numbers and loses precision.

    Raises:
        ValueError: a negative offset.
    """

    def __init__(self, head_dim: int, offset: float = 1.0):
        check_finite(offset=offset)
        if offset < 0:
            raise ValueError(f"offset is {offset}, but must be at least 0")
        super().__init__(head_dim, 1 + head_dim + head_dim * (head_dim + 1) // 2)
        self.offset = offset

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., 1 + D + D(D+1)/2]`."""
        constant = x.new_full((*x.shape[:-1], 1), self.offset)
        return torch.cat([constant, (2 * self.offset) ** 0.5 * x, pairs(x)], dim=-1)


class Taylor(FeatureMap):
    """phi(q) . phi(k) = 1 + s + s^2/2 with s = q . k / sqrt(D): the series of exp(s) up to s^2, at least 1/2.

    Based (arXiv 2402.18668). |exp(s) - phi(q) . phi(k)| <= |s|^3 exp(max(s, 0)) / 6, so narrow
    heads with small products come close to softmax. Packed: R = 1 + D + D(D+1)/2, as in `Polynomial`.
    """

    def __init__(self, head_dim: int):
        super().__init__(head_dim, 1 + head_dim + head_dim * (head_dim + 1) // 2)

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., 1 + D + D(D+1)/2]`."""
        x = x * self.head_dim**-0.25
        return torch.cat([torch.ones_like(x[..., :1]), x, 0.5**0.5 * pairs(x)], dim=-1)
