"""The input of the first block: a vector per token or pixel, plus its position."""

import math
from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn

from unrolled.models.blocks import INIT_STD
from unrolled.models.config import Positions, TransformerConfig
from unrolled.ops.checks import check_cu_seqlens, check_key_padding_mask
from unrolled.ops.dense import Layer
from unrolled.ops.observing import may_read, observed
from unrolled.ops.positions import sinusoidal
from unrolled.ops.sequence import current, positions_of


class PixelEmbedding(Layer):
    """Intensities as numbers: level l of L becomes x w + b with x = 2 l / (L - 1) - 1 in [-1, 1].

    Neighbouring levels start with similar vectors, which a table of L vectors would have to learn.

    Args:
        levels: L, at least 2.
        d_model: width of the vectors w and b.
        start_token: whether the id L is a start symbol with a vector of its own.
    """

    def __init__(self, levels: int, d_model: int, *, start_token: bool) -> None:
        super().__init__()
        self.levels = levels
        self.weight = nn.Parameter(INIT_STD * torch.randn(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.start = nn.Parameter(INIT_STD * torch.randn(d_model)) if start_token else None

    def forward(self, level: Tensor) -> Tensor:
        """[...] long -> [..., d_model]."""
        x = level.unsqueeze(-1).to(self.weight.dtype) * (2 / (self.levels - 1)) - 1
        embedded = torch.addcmul(self.bias, x, self.weight)
        if self.start is None:
            return embedded
        return torch.where((level == self.levels).unsqueeze(-1), self.start, embedded)


class PositionEmbedding(Layer):
    """Adds positions to embeddings; does nothing for "none" and for "rotary", which the attention applies.

    With "axial", position p is the point (p // n_2, p % n_2) of a grid [n_1, n_2], likewise for more axes,
    and the vectors of its coordinates are concatenated, as in the code of Reformer (Kitaev et al. 2020, arXiv
    2001.04451).
    With "sinusoidal" the embeddings are first multiplied by sqrt(d_model) (Vaswani et al. 2017, §3.4), since
    their initial scale is small next to sinusoids of amplitude 1.
    """

    def __init__(
        self,
        kind: Positions,
        d_model: int,
        max_length: int,
        axial_shape: Sequence[int] = (),
        axial_widths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.kind, self.axial_shape = kind, tuple(axial_shape)
        self.table = nn.Embedding(max_length, d_model) if kind == "learned" else None
        if kind == "axial":
            self.axes = nn.ModuleList(map(nn.Embedding, axial_shape, axial_widths))
            max_length = math.prod(axial_shape)
        self.max_length = max_length

    @classmethod
    def of(cls, config: TransformerConfig) -> Self:
        """Make the positions of a config."""
        axial = config.axial_shape or (), config.axial_widths or ()
        return cls(config.positions, config.positions_width, config.max_length, *axial)

    def forward(
        self,
        x: Tensor,
        *,
        start: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Add positions to whole sequences `x` [B, T, d_model].

        A row counts its valid tokens only, from `start` [B] (default 0); packed sequences each count from 0.
        Where processes share the sequence, the tokens of earlier slices count too.

        Raises:
            ValueError: a mask of another shape or type, or a position without a learned vector.
        """
        if self.kind in ("rotary", "none"):
            return x
        T = x.shape[1]
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *x.shape[:2])
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x, x)
        positions = positions_of(x, key_padding_mask, cu_seqlens)
        if start is not None:
            positions = start.unsqueeze(1) + positions
        if cu_seqlens is None and (ranks := current()) is not None:
            T = T * ranks.size
        if key_padding_mask is not None:  # padding may reach beyond the last learned position
            positions = positions.masked_fill(key_padding_mask, 0)
        return self.at(x, positions, below=T if start is None else None)

    def at(self, x: Tensor, positions: Tensor, *, below: int | None = None) -> Tensor:
        """Add the given `positions` [...] to `x` [..., d_model].

        `below` is a known upper bound of the positions, which makes it unnecessary to read them.

        Raises:
            ValueError: a position has no learned vector.
        """
        if self.kind in ("rotary", "none"):
            return x
        if self.kind == "sinusoidal":
            d_model = x.shape[-1]
            return x * math.sqrt(d_model) + sinusoidal(positions, d_model, dtype=x.dtype)
        max_length = self.max_length
        if (below is None or below > max_length) and _readable(positions):
            length = int(positions.max()) + 1
            if length > max_length:
                bound = "the product of axial_shape" if self.kind == "axial" else "max_length"
                raise ValueError(
                    f"the input has length {length}, but must have at most {bound} = {max_length}"
                )
        return x + self._vectors(positions)

    def _vectors(self, positions: Tensor) -> Tensor:
        if self.table is not None:
            return cast(Tensor, self.table(positions))
        first, *others = self.axes
        vectors: list[Tensor] = []
        for size, axis in zip(reversed(self.axial_shape[1:]), reversed(others), strict=True):
            vectors.insert(0, axis(positions % size))
            positions = positions // size
        # No remainder along the first axis: a position beyond the grid must not wrap around.
        return torch.cat([first(positions), *vectors], dim=-1)


def _readable(x: Tensor) -> bool:
    """Whether the values of `x` may be read, on a GPU too, unless a CUDA graph is captured."""
    if x.is_cuda:
        return x.numel() > 0 and not torch.cuda.is_current_stream_capturing() and not observed()
    return x.numel() > 0 and may_read(x)
