"""Positions of tokens and their encodings."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unrolled.ops.checks import shape, wrong_shape
from unrolled.ops.packing import segment_ids
from unrolled.ops.precision import exact_dtype
from unrolled.ops.rotation import rotate_pairs

ROTARY_BASE = 10000.0


def positions_from_padding(key_padding_mask: Tensor) -> Tensor:
    """Number of valid tokens before each token, `[B,T]`, so that padding does not shift positions."""
    valid = (~key_padding_mask).long()
    return (valid.cumsum(1) - valid).clamp(min=0)


def positions_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of each packed token in its own sequence, `[1,total]`."""
    place = torch.arange(total, device=cu_seqlens.device)
    return (place - cu_seqlens.long()[segment_ids(cu_seqlens, total)]).unsqueeze(0)


def sinusoidal(positions: Tensor, dim: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/dim)), PE(p, 2i+1) = cos(the same): `[...]` -> `[..., dim]`.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.5. `dim` is even.
    """
    angles = _angles(positions, dim, "dim")
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


def grid_positions(sizes: Sequence[int], *, device: torch.device | None = None) -> Tensor:
    """Coordinates of a grid's points, each axis evenly from -1 to 1: `[*sizes, A]` for A axes."""
    exact = exact_dtype(torch.device("cpu") if device is None else device)
    axes = [torch.linspace(-1, 1, size, device=device, dtype=exact) for size in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def fourier_features(
    positions: Tensor, n_bands: int, resolution: Sequence[float], *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sines and cosines of coordinates in [-1, 1], and the coordinates: `[..., A]` -> `[..., A (2K + 1)]`.

        axis x:  [sin(pi f_1 x) .. sin(pi f_K x), cos(pi f_1 x) .. cos(pi f_K x), x]

    The K frequencies of an axis are spaced evenly from 1 to mu / 2, the highest that a grid of mu points can
    tell apart. Jaegle et al. 2021, "Perceiver" (arXiv 2103.03206), section 3.2.

    Args:
        positions: coordinates of points on A axes, such as `grid_positions` makes.
        n_bands: number K of frequencies.
        resolution: mu of each axis.
        dtype: dtype of the result; the angles are computed in fp64 if the device supports it.

    Raises:
        ValueError: the wrong number of axes, or `n_bands` below 1.
    """
    axes = positions.shape[-1] if positions.dim() else 0
    if axes != len(resolution):
        raise ValueError(f"resolution has {len(resolution)} axes, but positions {shape(positions)} {axes}")
    if n_bands < 1:
        raise ValueError(f"n_bands is {n_bands}, but must be at least 1")
    exact = exact_dtype(positions.device)
    top = torch.tensor(resolution, device=positions.device, dtype=exact) / 2
    share = torch.linspace(0, 1, n_bands, device=positions.device, dtype=exact)
    x = positions.to(exact).unsqueeze(-1)
    angles = torch.pi * x * (1 + share * (top.unsqueeze(-1) - 1))
    return torch.cat([angles.sin(), angles.cos(), x], dim=-1).flatten(-2).to(dtype)


def rotary(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = ROTARY_BASE,
    dim: int | None = None,
    closed: bool = False,
) -> Tensor:
    """Rotate each pair (x_2i, x_2i+1) of `x [B,T,H,D]` by the angle p / base^(2i/D).

    The position p of each token is in `positions [B,T]`. For one token of each row, the shapes are `[B,H,D]`
    and `[B]`. With `dim`, only the first `dim` of the D numbers are rotated, as if D were `dim` (GPT-J). With
    `closed`, the angle is p / base^(2i/(D-2)): the exponents go from 0 to 1 inclusive, as in the code of
    RetNet.

    The product of two rotated vectors depends on the difference of their positions only. Su et al. 2021,
    "RoFormer" (arXiv 2104.09864), eq. 34. D is even. With linear attention only the numerator may be rotated:
    the weights in the denominator must stay positive (eq. 19 of the same paper).
    """
    if positions.shape != x.shape[:-2]:
        raise wrong_shape("positions", positions, f"{list(x.shape[:-2])} for x {shape(x)}")
    # Expanded positions are the same in all rows, so the angles of one row are enough.
    if positions.dim() == 2 and positions.stride(0) == 0:
        positions = positions[:1]
    turned = x.shape[-1] if dim is None else min(dim, x.shape[-1])
    angles = _angles(positions, turned, "the head width", base, closed)
    return rotate_pairs(x, angles.cos(), angles.sin())


def _angles(
    positions: Tensor, dim: int, name: str, base: float = ROTARY_BASE, closed: bool = False
) -> Tensor:
    if dim % 2:
        raise ValueError(f"{name} is {dim}, but must be even: sinusoidal and rotary positions come in pairs")
    exact = exact_dtype(positions.device)
    last = max(1, dim - 2) if closed else dim
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=exact) / last
    return positions.to(exact).unsqueeze(-1) * base**-exponents
