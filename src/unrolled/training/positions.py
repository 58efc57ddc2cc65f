"""Loss and accuracy of a language model by position."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Dataset
from unrolled.models.heads import token_nll
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import evaluating
from unrolled.training.interfaces import Trainable


@dataclass(frozen=True)
class Score:
    """Mean loss and accuracy over the targets at some positions, with standard errors.

    Attributes:
        start, stop: the range of positions, from `start` to `stop` - 1, counted from 0.
        windows: number of windows (examples of the validation split) that have a target in the range.
        targets: number of targets in the range.
        loss, loss_error: mean loss in nats per token, and its standard error.
        correct: number of targets that are the most likely token.
        accuracy, accuracy_error: `correct / targets`, and its standard error.

    With one window, the standard errors are None.
    """

    start: int
    stop: int
    windows: int
    targets: int
    loss: float
    loss_error: float | None
    correct: int
    accuracy: float
    accuracy_error: float | None


def evaluate_positions(
    model: Trainable, dataset: Dataset, config: TrainConfig, ranges: Sequence[tuple[int, int]]
) -> list[Score]:
    """Evaluate a language model on the whole validation split, in ranges of positions.

    Targets of one window depend on each other, so standard errors are computed over windows, not targets.
    With c_w targets in window w, the sum s_w of their losses, and n windows, the mean m and its error are

        m = sum_w s_w / sum_w c_w,    error^2 = n / (n - 1) sum_w (s_w - m c_w)^2 / (sum_w c_w)^2

    (Cochran 1977, "Sampling Techniques", section 2.11, on the estimation of a ratio). Consecutive windows of
    one text count as independent.

    Args:
        model: maps tokens [B,T] to logits [B,n,V] of the last n positions.
        dataset: all of its `eval_batches` are evaluated; `config.eval_batches` is ignored.
        config: batch size and precision.
        ranges: (start, stop) of each range.

    Returns:
        The score of each range, without those that have no target.

    Raises:
        ValueError: there is no range, the validation split is empty, or no range has a target.
    """
    if not ranges:
        raise ValueError("ranges is empty, but must have at least one range")
    parts: list[Tensor] = []
    forward = cast(Callable[..., Tensor], model)
    with evaluating(model) as device:
        for batch in dataset.eval_batches(config.batch_size):
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                logits = _logits(forward, batch, device)
            parts.append(_sums(logits, batch.targets.to(device), ranges).cpu())
    if not parts:
        raise ValueError("the validation split is empty")
    scores = []
    for (start, stop), sums in zip(ranges, torch.cat(parts, dim=1), strict=True):
        sums = sums[sums[:, 0] > 0]
        if len(sums):
            scores.append(_score(start, stop, *sums.T))
    if not scores:
        raise ValueError(f"the validation split has no target in {list(ranges)}: all are {IGNORED}")
    return scores


def _logits(forward: Callable[..., Tensor], batch: Batch, device: torch.device) -> Tensor:
    """Logits [B,n,V] of the last n positions of each row; of all positions if rows hold packed sequences."""
    inputs = batch.inputs.to(device)
    if batch.cu_seqlens is None:
        return forward(inputs)
    logits = forward(inputs.reshape(1, -1), cu_seqlens=batch.cu_seqlens.to(device))
    return logits.reshape(*inputs.shape, -1)


def _sums(logits: Tensor, targets: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The number of targets, the sum of their losses and the number of correct ones: [R,B,3]."""
    first = targets.shape[1] - logits.shape[1]
    targets = targets[:, first:]
    right = logits.argmax(-1) == targets  # False where ignored
    counted = torch.stack([targets != IGNORED, token_nll(logits, targets), right], dim=-1).double()
    return torch.stack(
        [counted[:, max(start - first, 0) : max(stop - first, 0)].sum(1) for start, stop in ranges]
    )


def _score(start: int, stop: int, counts: Tensor, losses: Tensor, right: Tensor) -> Score:
    loss, loss_error = _mean(losses, counts)
    accuracy, accuracy_error = _mean(right, counts)
    n, total, correct = len(counts), int(counts.sum()), int(right.sum())
    return Score(start, stop, n, total, loss, loss_error, correct, accuracy, accuracy_error)


def _mean(sums: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """The mean and its standard error; see `evaluate_positions`."""
    n, total = len(counts), counts.sum()
    mean = sums.sum() / total
    if n == 1:
        return mean.item(), None
    spread = (sums - mean * counts).square().sum() * n / (n - 1)
    return mean.item(), math.sqrt(spread) / total.item()
