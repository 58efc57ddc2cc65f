"""Refusing wrong input with a sentence that says what was wanted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unrolled.contract import IGNORED


def check_ids(name: str, ids: Tensor, n_ids: int) -> None:
    """Raise ValueError unless `ids` is [B, T] long and, on a CPU, within [0, n_ids).

    On other devices reading the values would stall the queue, and a compiled graph cannot: there the
    embedding table's own assertion has to do.
    """
    if ids.dim() != 2 or ids.dtype != torch.long:
        raise ValueError(f"{name} is {ids.dtype} of the shape {list(ids.shape)}, wanted [B, T] of torch.long")
    if ids.device.type == "cpu" and ids.numel() > 0 and not torch.compiler.is_compiling():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= n_ids:
            raise ValueError(f"{name} holds ids from {low} to {high}, wanted ids in [0, {n_ids})")


def check_targets(targets: Tensor, shape: Sequence[int], levels: int) -> None:
    """Raise ValueError unless `targets` is long, of `shape` and, on a CPU, within [0, levels) or ignored."""
    if targets.dtype != torch.long or targets.shape != torch.Size(shape):
        raise ValueError(
            f"targets is {targets.dtype} of the shape {list(targets.shape)}, "
            f"wanted torch.long of the shape {list(shape)}"
        )
    if targets.device.type == "cpu" and targets.numel() > 0 and not torch.compiler.is_compiling():
        asked = targets[targets != IGNORED]
        if asked.numel() and not 0 <= int(asked.min()) <= int(asked.max()) < levels:
            raise ValueError(
                f"targets holds values from {int(asked.min())} to {int(asked.max())}, "
                f"wanted [0, {levels}), or {IGNORED} for none"
            )
