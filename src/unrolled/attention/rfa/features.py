"""The features of queries and keys, and the attention that suits each kernel."""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unrolled.attention.rfa.sums import (
    RfaSums,
    rfa_attention,
    rfa_attention_step,
    signed_rfa_attention,
    signed_rfa_attention_step,
)
from unrolled.ops.observing import may_read
from unrolled.ops.options import check_choice
from unrolled.ops.precision import accumulated, without_autocast
from unrolled.ops.random_features import Projection, Rows


class Kernel(NamedTuple):
    """A kernel: its features of W (s u), and attention by them."""

    features: Callable[[Tensor], Tensor]
    per_row: int
    attend: Callable[..., tuple[Tensor, RfaSums]]
    step: Callable[..., tuple[Tensor, RfaSums]]
    sharpest: float | None = None  # mean(s^2) up to which divisors of 64 features are rarely negative


def fourier(wx: Tensor) -> Tensor:
    """Return [sin(Wx), cos(Wx)]."""
    return torch.cat([wx.sin(), wx.cos()], -1)


KERNELS = {
    "fourier": Kernel(fourier, 2, signed_rfa_attention, signed_rfa_attention_step, sharpest=3.0),
    "arccos": Kernel(torch.relu, 1, rfa_attention, rfa_attention_step),
}


class RfaMap(nn.Module):
    """Features of queries and keys `[...,H,D]`, with norms of 1 (fourier) or about |s u| / sqrt(2) (arccos).

    Args:
        n_heads: number of heads, each with its own rows and scale.
        head_dim: D.
        features: "fourier" or "arccos".
        n_features: number n of rows per head.
        rows: distribution of the rows, see `draw_rows`.
        seed: see `Projection`.

    Raises:
        ValueError: unknown features or rows, or sizes out of range.
    """

    not_decayed = ("scale",)

    def __init__(
        self, n_heads: int, head_dim: int, features: str, n_features: int, rows: Rows, seed: int | None
    ):
        super().__init__()
        check_choice("features", features, KERNELS)
        self.features = features
        self.feature_dim = self.kernel.per_row * n_features
        self.scale = nn.Parameter(torch.ones(n_heads, head_dim))
        self.projection = Projection(n_heads, n_features, head_dim, rows, seed)
        self._warned = False

    @property
    def kernel(self) -> Kernel:
        """The functions of this kernel; not an attribute, since functions cannot be pickled."""
        return KERNELS[self.features]

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return phi(x) `[...,H,R]`, in at least fp32; a vector of zeros, without a direction, stays zero.

        `rotate`, if given, rotates the vectors s u by their positions.
        """
        with without_autocast(x.device):
            x = accumulated(x)
            scale = self.scale.to(x.dtype).repeat_interleave(x.shape[-2] // len(self.scale), 0)
            zero = (x == 0).all(-1, keepdim=True)  # the norm of zeros has no second derivative
            x = torch.where(zero, 1, x)
            x = x / x.detach().abs().amax(-1, keepdim=True)  # else the square of a small number would be 0
            x = torch.where(zero, 0, x / x.norm(dim=-1, keepdim=True)) * scale
            if rotate is not None:
                x = rotate(x)
            wx: Tensor = self.projection(x)
            return self.kernel.features(wx) / math.sqrt(wx.shape[-1])

    def warn_if_sharp(self) -> None:
        """Warn once if the learned scale makes divisors unreliable, where reading it costs nothing."""
        sharpest = self.kernel.sharpest
        if sharpest is None or self._warned or not may_read(self.scale):
            return
        sharpness = float(self.scale.detach().square().mean())
        if sharpness > sharpest:
            self._warned = True
            warnings.warn(
                f"the learned scale of random Fourier features has mean(scale^2) = {sharpness:.1f}, above "
                f"{sharpest:g}: their estimated divisors may be near 0 or negative and the outputs large; "
                "bound the scale, increase n_features, or use features='arccos'",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        """Return kernel and number of features, for `print(model)`."""
        return f"features={self.features}, feature_dim={self.feature_dim}"
