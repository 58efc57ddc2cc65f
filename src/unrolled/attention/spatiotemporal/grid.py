"""A grid [time, height, width] cut into groups of places, each one block of a sparse attention.

A volume is `[B,H,*size,W]`: W numbers for each place of the grid, in each of H heads. Groups are rows, tiles
that read their neighbourhood, or the places of one residue class.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Axes = tuple[int, int, int]
"""One number for each of time, height and width."""


def axes(numbers: Sequence[int]) -> Axes:
    """Convert a sequence of three numbers."""
    t, h, w = numbers
    return t, h, w


class Part(NamedTuple):
    """A cut of the grid into groups that attend within themselves, by one matrix product each.

    On each axis a group has `members` that are `step` apart, and reads `halo` more places on each side. With
    `within`, a member reads only places that are at most this far away on every axis; with `without`, only
    places that are further away on some axis.
    """

    members: Axes
    step: Axes = (1, 1, 1)
    halo: Axes = (0, 0, 0)  # only with a step of 1
    within: Axes | None = None
    without: Axes | None = None

    @property
    def keys(self) -> Axes:
        """Return the number of keys of a group on each axis."""
        return axes([m + 2 * r for m, r in zip(self.members, self.halo, strict=True)])

    def groups(self, size: Axes) -> Axes:
        """Return the number of groups on each axis, rounded up."""
        return axes([-(-n // (m * s)) for n, m, s in zip(size, self.members, self.step, strict=True)])

    def overhang(self, size: Axes) -> Axes:
        """Return by how much the groups exceed each axis."""
        needed = zip(self.groups(size), self.members, self.step, size, strict=True)
        return axes([groups * m * s - n for groups, m, s, n in needed])


def volume(x: Tensor, size: Axes) -> Tensor:
    """Reshape `[B,T,H,W]` to `[B,H,*size,W]`, with zeros after the end."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, math.prod(size) - x.shape[1]))
    return x.reshape(*x.shape[:2], *size, x.shape[-1])


def grouped(x: Tensor, part: Part) -> Tensor:
    """Cut a volume `[B,H,*size,W]` into groups: `[B,H,P,members,W]`."""
    size = axes(x.shape[2:5])
    x = _pad(x, part.overhang(size))
    (t, h, w), (m_t, m_h, m_w), (s_t, s_h, s_w) = part.groups(size), part.members, part.step
    x = x.reshape(*x.shape[:2], t, m_t, s_t, h, m_h, s_h, w, m_w, s_w, x.shape[-1])
    return x.permute(0, 1, 2, 4, 5, 7, 8, 10, 3, 6, 9, 11).flatten(8, 10).flatten(2, 7)


def ungrouped(x: Tensor, part: Part, size: Axes) -> Tensor:
    """Undo `grouped`."""
    (t, h, w), (s_t, s_h, s_w) = part.groups(size), part.step
    x = x.reshape(*x.shape[:2], t, s_t, h, s_h, w, s_w, *part.members, x.shape[-1])
    x = x.permute(0, 1, 2, 8, 3, 4, 9, 5, 6, 10, 7, 11).flatten(8, 10).flatten(5, 7).flatten(2, 4)
    return x[:, :, : size[0], : size[1], : size[2]]


def read_by_groups(x: Tensor, part: Part) -> Tensor:
    """Cut a volume `[B,H,*size,W]` into the places that each group reads: `[B,H,P,keys,W]`."""
    if not any(part.halo):
        return grouped(x, part)
    x = _pad(x, part.overhang(axes(x.shape[2:5])))
    for axis, members, halo in zip((2, 4, 6), part.members, part.halo, strict=True):
        x = _windows(x, axis, members, halo)
    return x.permute(0, 1, 2, 4, 6, 3, 5, 7, 8).flatten(5, 7).flatten(2, 4)


def _windows(x: Tensor, axis: int, members: int, halo: int) -> Tensor:
    """Split an axis into groups and keys: `members` places, and `halo` more on both sides.

    `Tensor.unfold` does this too, but its gradient is slow.
    """
    groups, keys = x.shape[axis] // members, members + 2 * halo
    shifts = -(-keys // members)
    zeros = [0, 0] * (x.dim() - 1 - axis)
    x = F.pad(x, (*zeros, halo, (shifts - 1) * members - halo))
    parts = []
    for shift in range(shifts):
        blocks = torch.unflatten(x.narrow(axis, shift * members, groups * members), axis, (groups, members))
        parts.append(blocks.narrow(axis + 1, 0, min(members, keys - shift * members)))
    return torch.cat(parts, axis + 1)


def distances_in(part: Part, device: torch.device) -> list[Tensor]:
    """Return d_ij of the members and keys of a group, on each axis: `[members,keys]`."""
    return [
        (torch.arange(keys, device=device) - halo - torch.arange(members, device=device).unsqueeze(1)) * step
        for members, keys, halo, step in zip(part.members, part.keys, part.halo, part.step, strict=True)
    ]


def near(distances: list[Tensor], radius: Axes) -> Tensor:
    """Return whether pairs differ by at most `radius` on every axis: `[members,keys]` of a whole group."""
    t, h, w = (d.abs() <= r for d, r in zip(distances, radius, strict=True))
    pairs = t[:, None, None, :, None, None] & h[:, None, None, :, None] & w[:, None, None, :]
    return pairs.flatten(3).flatten(0, 2)


def _pad(x: Tensor, after: Axes) -> Tensor:
    """Add zeros, or False, after the three axes of a volume."""
    t, h, w = after
    return F.pad(x, (0, 0, 0, w, 0, h, 0, t)) if any(after) else x
