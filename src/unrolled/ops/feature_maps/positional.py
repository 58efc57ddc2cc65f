"""Feature maps that depend on the position."""

import math

import torch
from torch import Tensor

from unrolled.ops.feature_maps.base import FeatureMap
from unrolled.ops.observing import may_read
from unrolled.ops.options import check_integers
from unrolled.ops.precision import exact_dtype


class CosFormer(FeatureMap):
    """phi(x, i) = [relu(x) cos(pi i / 2M), relu(x) sin(pi i / 2M)] for a token at position i, R = 2D.

    The kernel is relu(q) . relu(k) cos(pi (i - j) / 2M): nearer keys weigh more, and the weights of keys
    within M positions are never negative. In cosFormer (arXiv 2202.08791), M is the length of the sequence.
    The output at a token then depends on the number of later tokens, which rules out a recurrence. Here M is
    fixed.

    Args:
        head_dim: D.
        max_length: M. Positions from 0 to M are valid; others raise a ValueError, on a CPU in eager mode,
            where reading values is cheap.

    Raises:
        ValueError: max_length below 1.
    """

    positional = True

    def __init__(self, head_dim: int, max_length: int = 1024):
        super().__init__(head_dim, 2 * head_dim)
        check_integers(1, max_length=max_length)
        self.max_length = max_length
        self.most_positions = max_length + 1  # for `unrolled.models.limits`

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map queries `[...,H,D]` at `positions [...]` to features `[...,H,2D]`."""
        return self._weighted(q, positions)

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map keys `[...,G,D]` at `positions [...]` to features `[...,G,2D]`."""
        return self._weighted(k, positions)

    def _weighted(self, x: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            raise ValueError("positions is None, but must be those of x: cosFormer weighs by distance")
        if may_read(positions) and bool((positions > self.max_length).any()):
            found = int(positions.max())
            raise ValueError(
                f"positions go up to {found}, but must be at most max_length = {self.max_length}"
            )
        features = self._wide("x", x).relu()
        if x.device != positions.device:
            raise ValueError(
                f"x is on {x.device}, but its positions are on {positions.device}: move one of them"
            )
        angles = positions.to(exact_dtype(x.device))[..., None, None] * (math.pi / 2 / self.max_length)
        cos, sin = angles.cos().to(features.dtype), angles.sin().to(features.dtype)
        return torch.cat([features * cos, features * sin], dim=-1)
