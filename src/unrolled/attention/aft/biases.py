"""The biases of attention free transformers: which keys have one, and how all keys are averaged with it.

Zhai et al. 2021, "An Attention Free Transformer", arXiv 2105.14103, section 3.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from unrolled.attention.aft.averages import (
    Keys,
    average_bidirectional,
    average_full,
    average_reference,
    counted,
)
from unrolled.ops.precision import accumulation_dtype

Claims = Mapping[str, bool | str]
"""Fields of `Supports`."""


class Sizes(NamedTuple):
    """The sizes that a bias is constructed from; each kind of bias uses some of them."""

    n_heads: int
    causal: bool
    window: int
    max_length: int
    rank: int


class Bias(nn.Module):
    """A bias w_tj of position t for position j.

    Attributes:
        window: keys less than this far away have a bias.
        max_length: number of positions that have biases; None for any.
        claims: how the claims of a mechanism with this bias differ from those with `FullBias`.
        default_window: the window by default; None for a bias without that option.
        one_key: a head has one key for all elements of its values.
    """

    window: int = 0
    max_length: int | None = None
    claims: ClassVar[Claims] = {}
    default_window: ClassVar[int | None] = None
    one_key: ClassVar[bool] = False

    def __init__(self, sizes: Sizes):
        super().__init__()

    def forward(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the biases `[B,n,H,r,c]` of positions `[B,n,r]` for positions `[B,n,c]`; H may be 1."""
        raise NotImplementedError

    def average(self, keys: Keys, T: int) -> Tensor:
        """Average all keys for each of T queries: `[B,T,H,M]`."""
        return average_bidirectional(keys, self, self.window)


class NoBias(Bias):
    """w_tj = 0."""

    claims: ClassVar[Claims] = {
        "recurrence": "constant",
        "attn_mask": False,
        "max_length": False,
        "positions": False,
    }

    def forward(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(*rows.shape[:2], 1, rows.shape[2], keys.shape[2], device=keys.device)

    def average(self, keys: Keys, T: int) -> Tensor:
        """Average all keys once, since the average is the same for all queries."""
        zero = keys.k.new_zeros(1, 1, 1, 1)
        return average_reference(keys.k, keys.v, zero, counted(keys)[:, None, None]).expand(-1, T, -1, -1)


class FullBias(Bias):
    """w_tj = a_t . b_j for positions up to `max_length` (section 3.2)."""

    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        self.window = self.max_length = sizes.max_length
        self.a = nn.Parameter(torch.empty(sizes.max_length, sizes.rank).normal_(std=0.01))
        self.b = nn.Parameter(torch.empty(sizes.max_length, sizes.rank).normal_(std=0.01))

    def forward(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the biases `[B,n,1,r,c]`, the same for all heads."""
        dtype = accumulation_dtype(self.a.dtype)
        return (self.a.to(dtype)[rows] @ self.b.to(dtype)[keys].mT).unsqueeze(2)

    def average(self, keys: Keys, T: int) -> Tensor:
        """Average all keys, each with its bias."""
        return average_full(keys, self, torch.arange(T, device=keys.k.device).expand(1, T))


class LocalBias(FullBias):
    """The bias of `FullBias` where |t - j| < window, and 0 elsewhere."""

    claims: ClassVar[Claims] = {"cross": False, "recurrence": "constant", "attn_mask": False}
    default_window = 32
    average = Bias.average

    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        self.window = sizes.window


class ConvolutionBias(Bias):
    """A bias for each head and distance in a window, normalised over the window (AFT-conv).

    Raises:
        ValueError: an even window that is not causal.
    """

    claims: ClassVar[Claims] = {**LocalBias.claims, "max_length": False}
    default_window = 15
    one_key = True
    not_decayed = ("gamma", "beta")

    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        n_heads, width, causal = sizes.n_heads, sizes.window, sizes.causal
        if not causal and width % 2 == 0:
            raise ValueError(f"window is {width}, but must be odd to be centred; causal windows need not be")
        self.window = width if causal else width // 2 + 1
        self.last = width - 1 if causal else width // 2  # place in the window of the distance 0
        self.taps = nn.Parameter(torch.empty(n_heads, width).normal_())
        self.gamma = nn.Parameter(torch.zeros(n_heads, 1))
        self.beta = nn.Parameter(torch.zeros(n_heads, 1))

    def forward(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the biases `[B,n,H,r,c]`."""
        dtype = accumulation_dtype(self.taps.dtype)
        taps = self.taps.to(dtype)
        centred = taps - taps.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        w = self.gamma.to(dtype) * centred / deviation + self.beta.to(dtype)
        place = (self.last - rows.unsqueeze(-1) + keys.unsqueeze(-2)).clamp(0, w.shape[1] - 1)
        return w[:, place].movedim(0, 2)


BIASES: dict[str, type[Bias]] = {
    "full": FullBias,
    "local": LocalBias,
    "simple": NoBias,
    "conv": ConvolutionBias,
}
