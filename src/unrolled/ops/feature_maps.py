"""Feature maps phi, whose products phi(q) . phi(k) take the place of exp(q . k).

A map acts on the last axis, from the head width D to `feature_dim`. Queries and keys may be mapped
differently. All of these are non-negative except the linear terms of the polynomial, whose kernel is.
Features of half-precision inputs are fp32: fp16 has no room for squares, nor for exp(-20).
"""

import torch
from torch import Tensor, nn

from unrolled.ops.precision import accumulation_dtype


class FeatureMap(nn.Module):
    """phi for one head width. A map whose two sides agree overrides `phi` alone, which is given fp32 or fp64.

    Attributes:
        head_dim: width D of the queries and keys that it takes.
        feature_dim: width R of the features that it gives.
    """

    def __init__(self, head_dim: int, feature_dim: int | None = None):
        super().__init__()
        if head_dim < 1:
            raise ValueError(f"head_dim is {head_dim}, but must be at least 1")
        self.head_dim = head_dim
        self.feature_dim = head_dim if feature_dim is None else feature_dim

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., R]`, queries and keys alike."""
        raise NotImplementedError

    def phi_q(self, q: Tensor) -> Tensor:
        """Map queries `[..., D]` to features `[..., R]`."""
        return self.phi(q.to(accumulation_dtype(q.dtype)))

    def phi_k(self, k: Tensor) -> Tensor:
        """Map keys `[..., D]` to features `[..., R]`."""
        return self.phi(k.to(accumulation_dtype(k.dtype)))

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"head_dim={self.head_dim}, feature_dim={self.feature_dim}"


class Elu(FeatureMap):
    """phi(x) = elu(x) + 1, everywhere positive (arXiv 2006.16236, eq. 7).

    Computed as relu(x) + exp(min(x, 0)): the literal elu(x) + 1 is exactly 0 below -16.6 in fp32.
    """

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        return x.relu() + x.clamp(max=0).exp()


class Relu(FeatureMap):
    """phi(x) = max(x, 0). A query or a key may map to 0: a query without any positive product gets 0."""

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        return x.relu()


class SquaredRelu(FeatureMap):
    """phi(x) = max(x, 0)^2, sharper than `Relu` and with a continuous gradient."""

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        return x.relu().square()


class Polynomial(FeatureMap):
    """phi(q) . phi(k) = (q . k + offset)^2, the kernel of degree 2 of arXiv 2006.16236, section 3.2.1.

    Packed: [offset, sqrt(2 offset) x_i, x_i^2, sqrt(2) x_i x_j for i < j], so R = 1 + D + D(D+1)/2 rather
    than 1 + D + D^2. Cheaper than softmax only where the length exceeds R. The kernel is 0 at
    q . k = -offset: a query with all its products close to that divides two small numbers and loses digits.
    """

    def __init__(self, head_dim: int, offset: float = 1.0):
        if offset < 0:
            raise ValueError(f"offset is {offset}, but must be at least 0")
        super().__init__(head_dim, 1 + head_dim + head_dim * (head_dim + 1) // 2)
        self.offset = offset

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., 1 + D + D(D+1)/2]`."""
        constant = x.new_full((*x.shape[:-1], 1), self.offset)
        i, j = torch.triu_indices(self.head_dim, self.head_dim, device=x.device)
        products = x[..., i] * x[..., j]
        pairs = torch.where(i == j, products, 2**0.5 * products)
        return torch.cat([constant, (2 * self.offset) ** 0.5 * x, pairs], dim=-1)


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "elu": Elu,
    "relu": Relu,
    "squared_relu": SquaredRelu,
    "polynomial": Polynomial,
}


def make_feature_map(name: str, head_dim: int) -> FeatureMap:
    """Make a feature map by its name in `FEATURE_MAPS`."""
    if name not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map is {name!r}, but must be one of {', '.join(FEATURE_MAPS)}, or a FeatureMap"
        )
    return FEATURE_MAPS[name](head_dim)
