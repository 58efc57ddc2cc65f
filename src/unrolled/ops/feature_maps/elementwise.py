"""Feature maps without parameters: elementwise functions and products of coordinates."""

import torch
from torch import Tensor

from unrolled.ops.feature_maps.base import FeatureMap
from unrolled.ops.options import check_integers

# e^60 = 1e26 is far beyond any use, and leaves fp32 room for sums of 1e12 such keys. The least feature is
# e^-60, because the gradient of a feature can be as large as its inverse.
LARGEST_EXPONENT = 60.0


class Elementwise(FeatureMap):
    """A function of each coordinate by itself, which `linear_attention` applies as it reads q and k."""

    @staticmethod
    def function(x: Tensor) -> Tensor:
        """Map coordinates of any shape."""
        raise NotImplementedError

    @staticmethod
    def slope(x: Tensor) -> Tensor:
        """Return the derivative of `function`."""
        raise NotImplementedError

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        return self.function(x)


class Elu(Elementwise):
    """phi(x) = elu(x) + 1, everywhere positive (arXiv 2006.16236, eq. 7).

    It is computed as relu(x) + exp(min(x, 0)), because the literal elu(x) + 1 is exactly 0 below -16.6 in
    fp32. The form used here is 0 from about -104 on. If every q_r + k_r is below about -71, the weights are
    too small in fp32 to divide by, and the query gets 0.
    """

    @staticmethod
    def function(x: Tensor) -> Tensor:
        """Map x to elu(x) + 1."""
        # At 0 the gradient is that of `masked_fill`, which is 1. That of `clamp` is 0 since PyTorch 2.14.
        return x.relu() + x.masked_fill(x > 0, 0).exp()

    @staticmethod
    def slope(x: Tensor) -> Tensor:
        """Map x to exp(min(x, 0))."""
        return x.clamp(max=0).exp()


class Relu(Elementwise):
    """phi(x) = max(x, 0). A query or a key may map to 0: a query without any positive product gets 0."""

    @staticmethod
    def function(x: Tensor) -> Tensor:
        """Map x to max(x, 0)."""
        return x.relu()

    @staticmethod
    def slope(x: Tensor) -> Tensor:
        """Map x to 1 where it is positive, and otherwise to 0."""
        return (x > 0).to(x.dtype)


class SquaredRelu(Elementwise):
    """phi(x) = max(x, 0)^2, sharper than `Relu` and with a continuous gradient."""

    @staticmethod
    def function(x: Tensor) -> Tensor:
        """Map x to max(x, 0)^2."""
        return x.relu().square()

    @staticmethod
    def slope(x: Tensor) -> Tensor:
        """Map x to 2 max(x, 0)."""
        return 2 * x.relu()


ELEMENTWISE: dict[str, type[Elementwise]] = {"elu": Elu, "relu": Relu, "squared_relu": SquaredRelu}


class Exp(FeatureMap):
    """phi(x) = exp(x): the kernel is sum_r exp(q_r + k_r), positive and sharp.

    The largest coordinate of a query is subtracted first; this factor cancels in the division. For keys no
    such factor cancels. All exponents are clamped to between -60 and 60, so that neither the sums nor their
    gradients overflow in fp32.
    """

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map `[..., D]` to exp(max(q - max q, -60))."""
        return exp_of_query(self._wide("q", q))

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map `[..., D]` to exp(k), with k clamped to between -60 and 60."""
        return exp_of_key(self._wide("k", k))


def exp_of_query(x: Tensor) -> Tensor:
    """exp(x - max x) over the last axis, at least e^-60: exp(x) up to a factor that cancels."""
    return (x - x.amax(-1, keepdim=True)).clamp(min=-LARGEST_EXPONENT).exp()


def exp_of_key(x: Tensor) -> Tensor:
    """exp(x) from e^-60 to e^60: a sum over many keys stays within fp32."""
    return x.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()


class Dpfp(FeatureMap):
    """DPFP-nu: products of neighbours, phi_j(x) = u * roll(u, j) for j = 1..nu with u = [relu(x), relu(-x)].

    Deterministic parameter-free projection (arXiv 2102.11174): R = 2 D nu sparse features, so that keys of
    different directions share few. A query or a key may map to 0, as with `Relu`.

    Args:
        head_dim: D.
        nu: how many neighbours each coordinate is multiplied by, at most 2D - 1.

    Raises:
        ValueError: nu out of range.
    """

    def __init__(self, head_dim: int, nu: int = 1):
        super().__init__(head_dim, 2 * head_dim * nu)
        check_integers(1, nu=nu)
        if nu >= 2 * head_dim:
            raise ValueError(f"nu is {nu}, but must be from 1 to 2 head_dim - 1 = {2 * head_dim - 1}")
        self.nu = nu

    def phi(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., 2 D nu]`."""
        u = torch.cat([x.relu(), (-x).relu()], dim=-1)
        return torch.cat([u * u.roll(j, -1) for j in range(1, self.nu + 1)], dim=-1)
