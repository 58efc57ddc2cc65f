"""Attention to a few rows of a batch at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unrolled.attention._heads import Heads, Masks
from unrolled.ops.checks import observed

CACHED = 2**21  # numbers of an intermediate result of a group: 8 MB in fp32


def attend_in_groups(
    attend: Callable[[Heads[Any], Masks], Tensor], heads: Heads[Any], masks: Masks, per_row: int
) -> Tensor:
    """Return `attend(heads, masks)`, computed for groups of rows on a CPU.

    The largest intermediate result has `per_row` numbers for each row of the batch. A group is as many rows
    as fit the cache with it, at least one; with `per_row` 0, it is all rows. A tensor in `heads` or `masks`
    is split if its first axis is as long as that of the queries.
    """
    # While a model is traced, the sizes are not numbers.
    if not heads.q.is_cpu or masks.cu_seqlens is not None or observed() or not per_row:
        return attend(heads, masks)
    rows, size = len(heads.q), max(1, CACHED // per_row)
    if size >= rows:
        return attend(heads, masks)
    if masks.attn_mask is not None:  # its first axis is that of the rows
        masks = masks._replace(attn_mask=masks.attn_mask[(None,) * (4 - masks.attn_mask.dim())])
    count = -(-rows // size)

    def split(x: Any) -> list[Any]:
        if isinstance(x, Tensor):
            return list(torch.split(x, size)) if len(x) == rows else [x] * count
        if x is None:
            return [None] * count
        return [type(x)._make(parts) for parts in zip(*map(split, x), strict=True)]

    return torch.cat([attend(*group) for group in zip(split(heads), split(masks), strict=True)])
