"""Loss and accuracy of a language model by position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Dataset, UnsupportedError
from unrolled.models.heads import token_nll
from unrolled.ops.options import check_integers
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import evaluating, only_predicted
from unrolled.training.interfaces import Trainable
from unrolled.training.segments import pieces


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
        model: maps tokens [B,T] to logits [B,n,V] of the last n positions. Where batches have padding, it
            takes a `key_padding_mask`, and n is T; padding counts as a position, but has no target.
        dataset: all of its `eval_batches` are evaluated; `config.eval_batches` is ignored.
        config: batch size, precision and segment; with a segment, the model also has `init_state` and
            `prefill`, as an `unrolled.models.LanguageModel`.
        ranges: (start, stop) of each range.

    Returns:
        The score of each range, without those that have no target.

    Raises:
        ValueError: there is no range, or a range is empty or begins before 0; the validation split is empty,
            or no range has a target.
        UnsupportedError: a batch has padding, and the model predicts at the end only.
    """
    if not ranges:
        raise ValueError("ranges is empty, but must have at least one range")
    for start, stop in ranges:
        check_integers(0, start=start)
        check_integers(start + 1, stop=stop)
    parts: list[Tensor] = []
    with evaluating(model) as device:
        for batch in dataset.eval_batches(config.batch_size):
            judged = _judged(model, batch, config, device)
            parts.append(_sums(judged, batch.inputs.shape[1], ranges).cpu())
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


def _judged(model: Any, batch: Batch, config: TrainConfig, device: torch.device) -> Tensor:
    """Judge the last n positions of each row: is there a target, its loss, is it the likeliest; `[B,n,3]`."""
    batch = only_predicted(model, batch)
    length = batch.inputs.numel() if config.segment is None else config.segment
    parts: list[Tensor] = []
    for piece in pieces(batch, length):
        inputs, targets = piece.inputs.to(device), piece.targets.to(device)
        padding = None if piece.key_padding_mask is None else piece.key_padding_mask.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
            if piece.cu_seqlens is not None:
                parts.append(_judge(model(inputs, cu_seqlens=piece.cu_seqlens.to(device)), targets))
            elif inputs.shape[1] <= length:
                logits = model(inputs, **({} if padding is None else {"key_padding_mask": padding}))
                if padding is not None and logits.shape[1] < inputs.shape[1]:
                    raise UnsupportedError(
                        f"{type(model).__name__} predicts the last valid tokens only, whose positions are "
                        "not known: evaluate rows without padding"
                    )
                parts.append(_judge(logits, targets))
            else:
                state = model.init_state(len(inputs))
                for at in range(0, inputs.shape[1], length):
                    part = slice(at, at + length)
                    masks = {} if padding is None else {"key_padding_mask": padding[:, part]}
                    logits, state = model.prefill(inputs[:, part], state, **masks)
                    parts.append(_judge(logits, targets[:, part]))
    return torch.cat(parts, dim=1).reshape(len(batch.inputs), -1, 3)


def _judge(logits: Tensor, targets: Tensor) -> Tensor:
    targets = targets[:, targets.shape[1] - logits.shape[1] :]
    right = logits.argmax(-1) == targets  # False where ignored
    return torch.stack([targets != IGNORED, token_nll(logits, targets), right], dim=-1).double()


def _sums(judged: Tensor, length: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The number of targets, the sum of their losses and the number of correct ones: [R,B,3]."""
    first = length - judged.shape[1]
    return torch.stack(
        [judged[:, max(start - first, 0) : max(stop - first, 0)].sum(1) for start, stop in ranges]
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
