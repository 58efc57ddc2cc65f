"""What `unrolled evaluate` measures: loss, accuracy, and both by position."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import typer

from unrolled.cli import _error_rate
from unrolled.cli._answers import answers
from unrolled.cli._overlap import intersection_over_union

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unrolled.cli.run_config import Run
    from unrolled.data import BaseDataset, Batch
    from unrolled.models.config import ModelConfig
    from unrolled.training import Score

KEYS = {"data", "unit", "loss", "splits"}
"""The keys that `measure` returns for every task."""


def in_windows(dataset: "BaseDataset", config: "ModelConfig", length: int) -> "BaseDataset":
    """Return the data set with examples of another length.

    Raises:
        ValueError: the data set has no such option, or the model has fewer positions.
    """
    if "length" not in [field.name for field in fields(cast(Any, dataset))]:
        raise ValueError(f"--length is for data with an option length, which {dataset.name} does not have")
    if config.n_positions is not None and length > config.n_positions:
        raise ValueError(
            f"--length is {length}, but must be at most {config.n_positions}: the model has learned a vector "
            "for each of its positions; train with model.positions=rotary, sinusoidal or none to go beyond"
        )
    return cast("BaseDataset", replace(cast(Any, dataset), length=length))


def measure(model: Any, run: "Run", positions: bool = False, beam_size: int = 1) -> dict[str, Any]:
    """Print and return the loss over the whole validation split, and the accuracy of the tasks that have one.

    Returns:
        data: the options of the data set.
        unit, loss: the loss of the validation split, and its unit.
        splits: for each split with an accuracy, the number of correct answers and the number of all answers.
        positions: for tokens, the score of all positions, then those of ranges if `positions` is True.
        iou: for bits, the intersection over union of predicted and true bits.
        errors: for speech, the error rate of the validation split; see `_error_rate.error_rate`.
        perplexity: for byte pairs and words, e to the loss.
        bits_per_byte: for text, the loss in bits per byte of UTF-8, from the mean number of bytes per target.
    """
    from unrolled import training
    from unrolled.cli import run_config

    dataset, task = run.dataset, run.dataset.task
    found: dict[str, Any] = {"data": run_config.plain(run.data), "unit": run_config.unit(task, run.kind)}
    if task == "tokens":
        length = next(iter(dataset.eval_batches(1))).inputs.shape[1]
        ranges = [(0, length), *(doubling(length) if positions else [])]
        scores = training.evaluate_positions(model, dataset, run.train, ranges)
        total = scores[0]
        found |= {"loss": total.loss, "splits": {"validation": (total.correct, total.targets)}}
        found["positions"] = [asdict(score) for score in scores]
        if dataset.vocabulary.kind == "tokenizer":
            found["perplexity"] = math.exp(total.loss)
        if (size := bytes_per_target(model, dataset)) is not None:
            found["bits_per_byte"] = total.loss / math.log(2) / size
        extent = f", over all {total.targets:,} targets in {total.windows:,} windows of {length:,} tokens"
    else:
        found["loss"] = training.evaluate(model, dataset, replace(run.train, eval_batches=None))
        found["splits"] = count_splits(model, dataset, run.train.batch_size)
        extent = ""
    bits = f", {found['loss'] / math.log(2):.4f} bits" if task in ("tokens", "bits") else ""
    if "perplexity" in found:
        bits += f", perplexity {found['perplexity']:.2f}"
    if "bits_per_byte" in found:
        bits += f", {found['bits_per_byte']:.4f} bits/byte"
    typer.echo(f"validation loss {found['loss']:.4f} {found['unit']}{bits}{extent}")
    for name, (right, count) in found["splits"].items():
        typer.echo(f"{name} split: {right:,} of {count:,} correct, {right / count:.2%}")
    if task == "bits":
        found["iou"] = intersection_over_union(model, dataset, run.train.batch_size)
        if found["iou"] is not None:
            typer.echo(f"validation split: intersection over union {found['iou']:.2%}")
    if task == "transcription":
        rate = _error_rate.error_rate(model, dataset, run.train.batch_size, beam_size)
        found["errors"] = asdict(rate)
        typer.echo(_error_rate.sentence(rate))
    if positions:
        typer.echo(f"\n{_table(scores)}")
    return found


def bytes_per_target(model: Any, dataset: "BaseDataset") -> float | None:
    """Return the mean bytes of UTF-8 that a predicted target of the validation split stands for.

    Tokens that have no text, such as the end of a document, count as targets without bytes. The result is
    None if the bytes are unknown.
    """
    import torch

    from unrolled.training.evaluation import only_predicted

    counts = dataset.vocabulary.byte_counts()
    if counts is None:
        return None
    sizes, total, targets = torch.tensor(counts), 0, 0
    for batch in dataset.eval_batches(64):
        predicted = only_predicted(model, batch).targets
        known = predicted[predicted >= 0]
        total += int(sizes[known].sum())
        targets += len(known)
    return total / targets if total else None


def doubling(length: int) -> list[tuple[int, int]]:
    """Return ranges that cover the positions below `length`: 0 to 64, 64 to 128, 128 to 256, and so on.

    If `length` is below 512, the first range is shorter: an eighth of the greatest power of two that is at
    most `length`, but at least 1.
    """
    stop = min(64, max(1, (1 << length.bit_length() - 1) // 8))
    stops = [0]
    while stop < length:
        stops.append(stop)
        stop *= 2
    return list(pairwise([*stops, length]))


def _table(scores: "Sequence[Score]") -> str:
    from unrolled.bench.report import table

    def error(value: float | None, how: str) -> str:
        return "" if value is None else f"± {value:{how}}"

    return table(
        ["positions", "targets", "nats/token", "standard error", "correct", "standard error"],
        [
            [
                f"{score.start:,} to {score.stop:,}",
                f"{score.targets:,}",
                f"{score.loss:.4f}",
                error(score.loss_error, ".4f"),
                f"{score.accuracy:.2%}",
                error(score.accuracy_error, ".2%"),
            ]
            for score in ([*scores[1:], scores[0]] if len(scores) > 2 else scores[:1])
        ],
    )


def count_splits(model: "nn.Module", dataset: "BaseDataset", batch_size: int) -> dict[str, tuple[int, int]]:
    """Return the numbers of correct answers and of all answers on each split that the data set has."""
    judges = {"labels": right_labels, "answers": right_labels, "bits": right_bits}
    if dataset.task not in judges:
        return {}
    splits = {"validation": dataset.eval_batches, "test": dataset.test_batches}
    device, judge = next(model.parameters()).device, judges[dataset.task]
    counts = {
        name: count_right(model, batches(batch_size), device, judge) for name, batches in splits.items()
    }
    return {name: count for name, count in counts.items() if count[1]}  # few data sets have a test split


def count_right(
    model: "nn.Module",
    batches: "Iterable[Batch]",
    device: "torch.device",
    judge: "Callable[[Tensor, Tensor], Tensor]",
) -> tuple[int, int]:
    """Return the numbers of correct answers and of all answers.

    `judge` is `right_labels` or `right_bits`.
    """
    import torch

    right = count = 0
    with torch.inference_mode():
        for batch in batches:
            judged = judge(answers(model, batch, device), batch.targets)
            right += int(judged.sum())
            count += judged.numel()
    return right, count


def right_labels(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Whether the most likely label of each row is its first target: [B]."""
    return logits.argmax(-1) == targets.reshape(len(targets), -1)[:, 0]


def right_bits(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Whether the more likely value of each bit that is not ignored is its target: [n]."""
    from unrolled.contract import IGNORED

    asked = targets != IGNORED
    return (logits[asked] > 0) == (targets[asked] > 0)
