"""Recurrent layers as models use them: stacks by the name of their cell, and torch's LSTM."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from unrolled import recurrent
from unrolled.ops.precision import without_autocast
from unrolled.ops.processor import multiplies_bf16
from unrolled.recurrent import Stacked


def stack_of(cell: str, cell_options: dict[str, Any], widths: list[int], *, dropout: float = 0.0) -> Stacked:
    """Stack one layer for each pair of consecutive `widths`, with dropout between the layers.

    Raises:
        ValueError: there is no such cell, or it does not take one of its options.
    """
    make = recurrent.load(cell)
    try:
        return Stacked([make(a, b, **cell_options) for a, b in pairwise(widths)], dropout=dropout)
    except TypeError as error:
        raise ValueError(f"cell_options of {cell!r} do not fit: {error}") from error


def run_lstm(layer: nn.Module, x: Tensor | PackedSequence) -> Any:
    """Run a `torch.nn.LSTM`; under autocast on a CPU, in bf16 if the processor multiplies bf16.

    If not, it runs in the dtype of its weights, since torch has no bf16 LSTM for such CPUs.
    """
    cpu = torch.device("cpu")
    fast = torch.get_autocast_dtype("cpu") == torch.bfloat16 and multiplies_bf16(cpu)
    if x.is_cuda or not torch.is_autocast_enabled("cpu") or fast:
        return layer(x)
    with without_autocast(cpu):
        return layer(x.to(next(layer.parameters()).dtype))
