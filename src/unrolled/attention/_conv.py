"""A short convolution of queries, keys and values, for mechanisms that run as a recurrence."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from unrolled.attention._heads import Masks, Projected
from unrolled.ops.conv import causal_conv_step
from unrolled.ops.sequence import causal_conv


class ConvolvedState(NamedTuple):
    """The state of a mechanism, and the last W - 1 projections of its input `[B,W-1,C]`, the latest last."""

    heads: Any
    recent: Tensor


class ShortConvolution(nn.Module):
    """Filters every channel of queries, keys and values over the last W tokens; see `unrolled.ops.conv`.

    It is initialised as the identity: the last tap, which is that of the current token, is 1, and the others
    are 0.

    Args:
        widths: numbers of channels of queries, keys and values, over all heads.
        taps: the number of tokens W.
        activation: apply silu to the result.
        bias: add a bias to each channel before silu.
    """

    def __init__(self, widths: Sequence[int], taps: int, *, activation: bool, bias: bool):
        super().__init__()
        self.widths = list(widths)
        self.activation: Literal["silu"] | None = "silu" if activation else None
        self.weight = nn.Parameter(torch.zeros(sum(widths), taps))
        nn.init.ones_(self.weight[:, -1])
        self.bias = nn.Parameter(torch.zeros(sum(widths))) if bias else None

    def init_recent(self, batch_size: int, dtype: torch.dtype) -> Tensor:
        """Make the inputs before the first token: zeros."""
        channels, taps = self.weight.shape
        return self.weight.new_zeros(batch_size, taps - 1, channels, dtype=dtype)

    def forward(
        self, projected: Projected, masks: Masks, recent: Tensor | None = None
    ) -> tuple[Projected, Tensor]:
        """Filter `q [B,T,H,D]`, `k [B,T,G,D]`, `v [B,T,G,M]`, or one token without T.

        Returns:
            the filtered q, k and v, and the last W - 1 inputs, one row per sequence.
        """
        x = torch.cat([part.flatten(-2) for part in projected], -1)
        bias, f = self.bias, self.activation
        if recent is not None and x.dim() == 2:
            y, after = causal_conv_step(x, self.weight, recent, bias=bias, activation=f)
        else:
            keys = masks.of_keys()
            y, after = causal_conv(x, self.weight, bias=bias, activation=f, state=recent, **keys)
        parts = y.split_with_sizes(self.widths, -1)
        q, k, v = (torch.unflatten(y, -1, part.shape[-2:]) for y, part in zip(parts, projected, strict=True))
        return (q, k, v), after

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        channels, taps = self.weight.shape
        return f"{channels}, taps={taps}, activation={self.activation}, bias={self.bias is not None}"
