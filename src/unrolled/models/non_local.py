r"""Non-local block: every position of a feature map attends to all positions; the result is added to the map.

    z_i = x_i + W_z y_i + b_z        y_i = sum_j f(x_i, x_j) g(x_j) / C_i

    pairwise           f(x_i, x_j)                                C_i
    "gaussian"         exp(x_i . x_j)                             sum_j f(x_i, x_j)
    "embedded"         exp(theta_i . phi_j)                       sum_j f(x_i, x_j)
    "dot"              theta_i . phi_j                            the number of positions j
    "concatenation"    relu(w_theta . theta_i + w_phi . phi_j)    the number of positions j

theta, phi and g are linear in x: convolutions with kernel size 1. The first two rows are softmax attention
with one head and without the factor 1 / sqrt(D).

Wang, Girshick, Gupta and He 2018, "Non-local Neural Networks", arXiv 1711.07971, eq. 1-6; section 3.3 for
the subsampling. In the paper batch normalisation may follow W_z; here W_z itself starts at 0.

Cost for N positions that attend to K: time O(N K C) for C channels, except "dot", which is O((N + K) C^2):
its sums over j do not depend on i. Memory O(N K) for "concatenation", else O((N + K) C) where one of torch's
fused softmax kernels fits.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.ops.checks import check_matches, shape, wrong_shape
from unrolled.ops.dense import Linear
from unrolled.ops.sequence import refuse
from unrolled.ops.softmax import softmax_attention

Pairwise = Literal["gaussian", "embedded", "dot", "concatenation"]
MAX_POOL: tuple[Callable[..., Tensor], ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


class NonLocalBlock(nn.Module):
    """Adds attention over all positions to a feature map `[B, C, *space]`; initially the identity.

    Args:
        channels: number of channels C.
        inner_channels: width of theta, phi and g; half of C by default.
        pairwise: the function f, as in the table above.
        pool: max-pool phi (with "gaussian", the input) and g over squares (with one axis, spans) of this
            size; the time axis of a video, the first of three, is not pooled. Positions that do not fill a
            square are dropped.

    Raises:
        ValueError: sizes below 1, or an unknown function.
    """

    def __init__(
        self,
        channels: int,
        inner_channels: int | None = None,
        *,
        pairwise: Pairwise = "embedded",
        pool: int = 1,
    ) -> None:
        super().__init__()
        inner = max(channels // 2, 1) if inner_channels is None else inner_channels
        for name, number in (("channels", channels), ("inner_channels", inner), ("pool", pool)):
            if number < 1:
                raise ValueError(f"{name} is {number}, but must be at least 1")
        if pairwise not in get_args(Pairwise):
            raise ValueError(f"pairwise is {pairwise!r}, but must be one of {', '.join(get_args(Pairwise))}")
        self.channels, self.pairwise, self.pool = channels, pairwise, pool
        embedded, concatenated = pairwise != "gaussian", pairwise == "concatenation"
        self.theta = Linear(channels, inner) if embedded else None
        self.phi = Linear(channels, inner) if embedded else None
        self.w_theta = Linear(inner, 1, bias=False) if concatenated else None
        self.w_phi = Linear(inner, 1, bias=False) if concatenated else None
        self.g = Linear(channels, inner)
        self.w_z = Linear(inner, channels)
        nn.init.zeros_(self.w_z.weight)
        nn.init.zeros_(self.w_z.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, *space]` to the same, with one to three axes of space.

        Raises:
            ValueError: another shape, or a map smaller than `pool`.
        """
        refuse("a non-local block")
        space = x.shape[2:]
        if not 1 <= len(space) <= 3 or x.shape[1] != self.channels:
            raise wrong_shape("x", x, f"[B, {self.channels}, *space] with 1 to 3 axes")
        check_matches("x", x, self.g.weight)
        if min(space[-2:]) < self.pool:
            raise ValueError(f"x has shape {shape(x)}, but the last axes must be at least pool = {self.pool}")
        places = x.flatten(2).mT
        y = self._read(places, partial(self._pooled, space=space))
        return x + self.w_z(y).mT.reshape(x.shape)  # type: ignore[no-any-return]

    def _read(self, x: Tensor, pooled: Callable[[Tensor], Tensor]) -> Tensor:
        """y of all positions `x [B, N, C]`: `[B, N, inner_channels]`."""
        g = pooled(self.g(x))
        if self.theta is None or self.phi is None:
            return _softmax(x, pooled(x), g)
        theta, phi = self.theta(x), pooled(self.phi(x))
        if self.pairwise == "embedded":
            return _softmax(theta, phi, g)
        g = g / g.shape[1]  # before the sum, which may overflow in half precision
        if self.w_theta is None or self.w_phi is None:
            y: Tensor = theta @ (phi.mT @ g)
        else:
            y = F.relu(self.w_theta(theta) + self.w_phi(phi).mT) @ g
        return y

    def _pooled(self, x: Tensor, space: torch.Size) -> Tensor:
        """Pool `x [B, N, W]` over the last two axes of its space: `[B, K, W]`."""
        if self.pool == 1:
            return x
        size = [1, self.pool, self.pool] if len(space) == 3 else [self.pool] * len(space)
        return MAX_POOL[len(space) - 1](x.mT.reshape(*x.mT.shape[:2], *space), size).flatten(2).mT


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    return softmax_attention(q, k, v, scale=1.0).squeeze(2)
