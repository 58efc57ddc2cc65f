"""Heads that share keys, for kernels that need keys for each head: the groups become rows of the batch.

The heads of a group then share the keys by a stride of 0. Nothing is copied if there is one row or one group.
"""

from torch import Tensor


def by_group(x: Tensor, groups: int) -> Tensor:
    """Return `x [B,T,heads,W]` as `[B groups, T, heads / groups, W]`."""
    rows, T, heads, W = x.shape
    each = heads // groups
    return x.reshape(rows, T, groups, each, W).transpose(1, 2).reshape(rows * groups, T, each, W)


def from_groups(x: Tensor, groups: int) -> Tensor:
    """Undo `by_group`."""
    rows, T, each, W = x.shape
    x = x.reshape(rows // groups, groups, T, each, W)
    return x.transpose(1, 2).reshape(rows // groups, T, groups * each, W)
