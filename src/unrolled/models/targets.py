"""The inputs of a decoder that is trained on given targets."""

import torch
from torch import Tensor

from unrolled.contract import IGNORED
from unrolled.models.checks import check_targets
from unrolled.ops.checks import shape


def shifted(targets: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Prepend the start symbol `vocab_size` to `targets [B,T]` and drop the last of each row: `[B,T]`.

    Ignored targets are read as id 0.

    Raises:
        ValueError: the targets are not long of `[rows,T]`, or neither in [0, vocab_size) nor ignored.
    """
    if targets.dim() != 2:
        raise ValueError(f"targets has shape {shape(targets)}, but must be [{rows}, T]")
    check_targets(targets, (rows, targets.shape[1]), vocab_size)
    start = targets.new_full((rows, 1), vocab_size)
    read = targets.masked_fill(targets == IGNORED, 0)
    return torch.cat([start, read], 1)[:, : targets.shape[1]]
