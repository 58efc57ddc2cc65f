"""Rows of different lengths as one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unrolled.ops.masks import padding_mask


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pad rows of ids at their end to the longest: ids [B,T], and a mask [B,T] that is True at padding."""
    ids = pad_sequence([torch.tensor(list(row), dtype=torch.long) for row in rows], batch_first=True)
    return ids, padding_mask(torch.tensor([len(row) for row in rows]))
