r"""Spatiotemporal attention: each place of a video reads the lines through it, or a cube around it.

A sequence of T tokens fills a grid [time, height, width] in row-major order. With d_ij the coordinate
differences of j and i on the three axes, place i reads, each key once,

    grid:    the j with at most one nonzero d_ij       time + height + width - 2 of them
    cube:    the j with |d_ij| <= radius on every axis; with `stride`, also the j whose d_ij is a multiple of
             stride on every axis

    o_i = sum_j softmax_j(s_ij) v_j        s_ij = scale q_i . (k_j + r^t[d_ij^t] + r^h[d_ij^h] + r^w[d_ij^w])

where the relative embeddings r are optional.

Duke, Ahmed, Wolf, Aarabi and Taylor 2021, "SSTVOS: Sparse Spatiotemporal Transformers for Video Object
Segmentation", arXiv 2101.08833: grid attention with scale = 1 and relative embeddings, and strided attention
as in Child et al. 2019, "Sparse Transformers", arXiv 1904.10509, on each axis. In the authors' code, a pair
of places has only the embedding of the axis on which the two differ, and the pair of i with itself has that
of its row. The result is the same if the three r[0] are equal.

Cost per head for n places: grid, time O(n (time + height + width) (D+M)) and O(n (time + height + width))
scores; cube of c keys, O(n c) scores, a few times as many as are used; strided, O(n^2 / stride^3) more.
Cannot: be causal, run as a recurrence, or honour an arbitrary `attn_mask`.
Equals softmax attention, with the default scale and without relative embeddings: grid attention, if at most
one axis is longer than 1; cube attention, if the cube holds the whole grid.

The last frame may be incomplete; the places that it lacks do not exist. Padded tokens are not part of the
video: the valid tokens fill the grid in their order. So whole frames may be padded, on any side.
"""

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._options import BIDIRECTIONAL_ONLY
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.attention.spatiotemporal.grid import (
    Axes,
    Part,
    axes,
    distances_in,
    grouped,
    near,
    read_by_groups,
    ungrouped,
    volume,
)
from unrolled.ops.checks import check_key_padding_mask, check_qkv, shape
from unrolled.ops.masks import without_padding
from unrolled.ops.merge import merge_softmax
from unrolled.ops.node import like_attention, one_node
from unrolled.ops.options import check_finite, check_integers_only
from unrolled.ops.packing import reorder, valid_first
from unrolled.ops.precision import accumulation_dtype, without_autocast


def reads(
    length: int, height: int, width: int, radius: Axes | None = None, stride: Axes | None = None
) -> Tensor:
    """Return which places j each place i reads, by the definition above: boolean `[length,length]`.

    Without a radius, grid attention; with one, the cube, and with a stride also the strided places.
    """
    place = torch.arange(length)
    coordinates = torch.stack([place // (height * width), place // width % height, place % width], -1)
    distance = (coordinates - coordinates.unsqueeze(1)).abs()
    if radius is None:
        return (distance > 0).sum(-1) <= 1
    found = (distance <= torch.tensor(radius)).all(-1)
    return found if stride is None else found | (distance % torch.tensor(stride) == 0).all(-1)


def line_parts(size: Axes) -> list[Part]:
    """Return the parts of grid attention: rows with the place itself, then columns and times without it."""
    time, height, width = size
    parts = [Part((1, 1, width))]
    parts += [Part((1, height, 1), without=(0, 0, 0))] if height > 1 else []
    parts += [Part((time, 1, 1), without=(0, 0, 0))] if time > 1 else []
    return parts


def cube_parts(size: Axes, radius: Axes, stride: Axes | None = None) -> list[Part]:
    """Return the parts of cube attention.

    Tiles twice the radius wide read their neighbourhood. With a stride, residue classes then read what is not
    in the cube.
    """
    tile, halo = [], []
    for n, r in zip(size, radius, strict=True):
        one_tile = 2 * r >= n  # several tiles would each read almost the whole axis
        tile.append(n if one_tile else max(2 * r, 1))
        halo.append(0 if one_tile else r)
    parts = [Part(axes(tile), halo=axes(halo), within=radius)]
    if stride is not None:
        members = axes([-(-n // s) for n, s in zip(size, stride, strict=True)])
        if any((m - 1) * s > r for m, s, r in zip(members, stride, radius, strict=True)):
            parts.append(Part(members, step=stride, without=radius))
    return parts


def spatiotemporal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    height: int,
    width: int,
    *,
    radius: Axes | None = None,
    stride: Axes | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    relative: Sequence[Tensor] | None = None,
) -> Tensor:
    """Attend along the lines of the grid or, with a `radius`, in the cube (equations above).

    Args:
        q: queries `[B,T,H,D]`.
        k, v: keys `[B,T,G,D]` and values `[B,T,G,M]`; H is a multiple of G.
        height, width: of a frame.
        radius: of the cube on each axis.
        stride: with a radius, also read the places a multiple of this apart on each axis.
        key_padding_mask: `[B,T]`, True = padding.
        scale: factor of the scores, 1/sqrt(D) by default.
        relative: for each axis a table `[2 N - 1,D]` of embeddings of the differences 1 - N to N - 1, with N
            at least the size of the axis.

    Returns:
        `o [B,T,H,M]`, computed in at least fp32; 0, with zero gradient, for a place without anything to read.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v)
    (B, T), S = q.shape[:2], v.shape[1]
    if S != T:
        raise ValueError(f"k has length {S}, but must have {T} like q: both are of the same video")
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, B, T)
    _check_sizes("height and width", (height, width), 1)
    if radius is None and stride is not None:
        raise ValueError(f"radius is None, but must be given with stride = {stride}: 0 for no cube")
    return attend_in_grid(q, k, v, height, width, radius, stride, key_padding_mask, scale, relative or [])


@one_node(like_attention)
def attend_in_grid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    height: int,
    width: int,
    radius: Sequence[int] | None,
    stride: Sequence[int] | None,
    key_padding_mask: Tensor | None,
    scale: float | None,
    relative: Sequence[Tensor],
) -> Tensor:
    """Implement `spatiotemporal_attention` with checked arguments."""
    (T, H, D), G = q.shape[1:], v.shape[2]
    if 0 < T < height * width:  # part of one frame: without its empty rows
        height = -(-T // width)
    size = (-(-T // (height * width)), height, width)
    parts = line_parts(size)
    if radius is not None:
        parts = cube_parts(size, axes(radius), None if stride is None else axes(stride))
    if relative:
        _check_relative(relative, size, D)
    if T == 0:  # an empty output that autograd can differentiate
        return torch.einsum("bthd,bshd,bshm->bthm", q, *(x.repeat_interleave(H // G, 2) for x in (k, v)))
    out_dtype, dtype, places, count = v.dtype, accumulation_dtype(q.dtype, k.dtype, v.dtype), None, None
    if key_padding_mask is not None:
        places, count = valid_first(key_padding_mask), (~key_padding_mask).sum(1)
        q, k, v = (reorder(without_padding(x, key_padding_mask), places) for x in (q, k, v))
    exists = None
    if count is not None or math.prod(size) > T:
        place = torch.arange(math.prod(size), device=q.device).unsqueeze(0)
        exists = (place < (T if count is None else count.unsqueeze(1))).reshape(-1, 1, *size, 1)
    with without_autocast(q.device):
        q = q.to(dtype) * (D**-0.5 if scale is None else scale)
        k, v = (x.to(dtype).repeat_interleave(H // G, dim=2) for x in (k, v))
        q, k, v = (volume(x, size) for x in (q, k, v))
        tables = [r.to(dtype) - r[len(r) // 2].to(dtype) for r in relative]
        o, _ = merge_softmax([_attend(q, k, v, part, exists, tables) for part in parts])
    o = o.flatten(2, 4)[:, :, :T].transpose(1, 2)
    return (o if places is None else reorder(o, places.argsort(1))).to(out_dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, part: Part, exists: Tensor | None, tables: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Attend in each group of the volumes `[B,H,*size,W]`: o, a volume, and lse `[B,H,*size]`."""
    size = axes(q.shape[2:5])
    queries, distances = grouped(q, part), distances_in(part, q.device)
    scores = queries @ read_by_groups(k, part).mT
    if tables:  # minus their centres, which add the same to all keys of a query and so cancel
        scores = scores + _relative_scores(queries, part, tables)
    if part.within is not None:
        scores.masked_fill_(~near(distances, part.within), -torch.inf)
    if part.without is not None:
        scores.masked_fill_(near(distances, part.without), -torch.inf)
    if exists is None and (any(part.halo) or part.overhang(size) != (0, 0, 0)):
        exists = torch.ones(1, 1, *size, 1, dtype=torch.bool, device=q.device)
    if exists is not None:
        scores.masked_fill_(~read_by_groups(exists, part).mT, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    weights = scores.sub_(largest).exp_()  # in place, to hold one number per pair
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (total.log() + largest).masked_fill(empty, -torch.inf)
    o = weights @ read_by_groups(v, part) / total
    return ungrouped(o, part, size), ungrouped(lse, part, size).squeeze(-1)


def _relative_scores(queries: Tensor, part: Part, tables: list[Tensor]) -> Tensor:
    """Return q_i . (r^t + r^h + r^w) of all pairs: `[B,H,P,members,D]` to `[B,H,P,members,keys]`."""
    x = queries.reshape(*queries.shape[:3], *part.members, queries.shape[-1])
    scores = x.new_zeros(*x.shape[:6], 1, 1, 1)
    for axis, (r, distance) in enumerate(zip(tables, distances_in(part, x.device), strict=True)):
        if part.keys[axis] > 1:
            furthest = len(r) // 2
            pairs = r[distance.clamp(-furthest, furthest) + furthest]  # no places are further apart
            member = "tyx"[axis]
            keys = [part.keys[axis] if other == axis else 1 for other in range(3)]
            found = torch.einsum(f"bgptyxd,{member}kd->bgptyxk", x, pairs)
            scores = scores + found.reshape(*found.shape[:-1], *keys)
    return scores.expand(*x.shape[:6], *part.keys).flatten(6).flatten(3, 5)


def _check_sizes(name: str, sizes: Sequence[int], low: int) -> None:
    if not all(type(n) is int and n >= low for n in sizes):
        raise ValueError(f"{name} is {list(sizes)}, but must be integers of at least {low}")
    check_integers_only(**{name: max(sizes)})


def _check_relative(relative: Sequence[Tensor], size: Axes, head_dim: int) -> None:
    for name, n, table in zip(("time", "height", "width"), size, relative, strict=True):
        if table.dim() != 2 or len(table) % 2 == 0 or table.shape[1] != head_dim:
            raise ValueError(f"relative has {shape(table)} for {name}, but must have [2 N - 1, {head_dim}]")
        if len(table) < 2 * n - 1:
            raise ValueError(
                f"the sequence has {name} {n}, but must have at most {len(table) // 2 + 1} for relative"
            )


class SpatiotemporalAttention(MultiHeadAttention[None, None]):
    """Multi-head grid, or cube, attention over a video whose frames follow each other row by row.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        shape: time, height and width of the grid. Sequences may have fewer or more frames; only `relative`
            limits them to `time`.
        radius: read the cube this far around each place on each axis (one number for all, or three), instead
            of the lines through it.
        stride: with a radius, also read the places a multiple of this apart on each axis.
        relative: learn embeddings of coordinate differences, shared by all heads; they start at 0.
        scale: factor of the scores, 1/sqrt(head_dim) by default; 1 in the paper.

    Raises:
        ValueError: sizes out of range.
        UnsupportedError: causal attention, or rotary positions.
    """

    supports = BIDIRECTIONAL_ONLY.but(cross=False)
    one_way = "frames are read as wholes; use sparse_transformer or window attention"
    no_rotary = "a video has three coordinates, not one; use relative=True"
    relative: nn.ParameterList | None

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        shape: Sequence[int] = (16, 8, 8),
        radius: int | Sequence[int] | None = None,
        stride: int | Sequence[int] | None = None,
        relative: bool = False,
        scale: float | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        self.shape = _three("shape", shape, 1)
        self.radius = None if radius is None else _three("radius", radius, 0)
        self.stride = None if stride is None else _three("stride", stride, 1)
        if radius is None and stride is not None:
            raise ValueError(f"radius is None, but must be given with stride = {stride}: 0 for no cube")
        if scale is not None:
            check_finite(scale=scale)
        self.scale, self.relative = scale, None
        if relative:
            self.relative = nn.ParameterList(torch.zeros(2 * n - 1, self.head_dim) for n in self.shape)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        (_, height, width), cube = self.shape, (self.radius, self.stride)
        relative = [] if self.relative is None else list(self.relative)
        padding = masks.key_padding_mask
        return attend_in_grid(*heads[:3], height, width, *cube, padding, self.scale, relative)

    def pattern(self, length: int) -> Tensor:
        """Return which keys each query reads, the same for all heads: `[H,length,length]`, 1 or 0."""
        found = reads(length, *self.shape[1:], self.radius, self.stride)
        return found.long().expand(self.n_heads, -1, -1)


def _three(name: str, given: int | Sequence[int], low: int) -> Axes:
    numbers = [given] * 3 if type(given) is int else list(given) if isinstance(given, Sequence) else []
    if len(numbers) != 3:
        raise ValueError(f"{name} is {given!r}, but must be three numbers, for time, height and width")
    _check_sizes(name, numbers, low)
    return axes(numbers)
