"""What a decoder reads to predict its targets."""

import torch
from torch import Tensor

from unrolled.contract import IGNORED
from unrolled.models.checks import check_targets


def shifted(targets: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Put the start symbol `vocab_size` before `targets [B,T]` and take the last of each row off: `[B,T]`.

    What is ignored is read as id 0.

    Raises:
        ValueError: the targets are not long of `[rows,T]`, or neither in [0, vocab_size) nor ignored.
    """
    if targets.dim() != 2:
        raise ValueError(f"targets has the shape {list(targets.shape)}, wanted [{rows}, T]")
    check_targets(targets, (rows, targets.shape[1]), vocab_size)
    start = targets.new_full((rows, 1), vocab_size)
    read = targets.masked_fill(targets == IGNORED, 0)
    return torch.cat([start, read], 1)[:, : targets.shape[1]]
