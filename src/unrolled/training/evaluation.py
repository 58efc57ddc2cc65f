"""The loss of a batch and of the validation split."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Dataset
from unrolled.models.mode import evaluation_mode
from unrolled.ops.sequence import Ranks, use
from unrolled.training._session import own_random_state
from unrolled.training.config import TrainConfig
from unrolled.training.interfaces import PredictsSome, Trainable, device_of
from unrolled.training.processes import ALONE, Processes
from unrolled.training.segments import Continues, Segments, pieces
from unrolled.training.slices import slice_of


class EvaluationStoppedError(Exception):
    """An evaluation was stopped before its end."""


def evaluate(
    model: Trainable,
    dataset: Dataset,
    config: TrainConfig,
    *,
    stop: Callable[[], bool] = lambda: False,
    processes: Processes = ALONE,
) -> float:
    """Mean loss over all targets of the validation split, or of its first `eval_batches`, in nats per token.

    Each batch counts by its number of targets, so the result does not depend on the batch size. Runs in eval
    mode, under the autocast of training, and leaves torch's random generators as they were.

    Args:
        model: in any mode, which is restored.
        dataset: its `eval_batches` are evaluated.
        config: batch size and number of batches.
        stop: called before each batch; True stops the evaluation.
        processes: the processes that share the batches; each has the model. Their losses are added in the
            order of the batches, so that the result is that of one process.

    Raises:
        EvaluationStoppedError: `stop` returned True.
        ValueError: there is no target to predict.
    """
    nats, targets = 0.0, 0
    with evaluating(model) as device:
        batches = islice(dataset.eval_batches(config.batch_size), config.eval_batches)
        while some := list(islice(batches, processes.teams)):
            if stop():
                raise EvaluationStoppedError
            some = [only_predicted(model, batch) for batch in some]
            counts = [count_targets(batch) for batch in some]
            if not any(counts):
                continue
            mine = processes.team
            if mine >= len(some) or not counts[mine]:  # the others wait for this process in any case
                mine = counts.index(max(counts))
            parts = processes.gather(_mean_loss(model, some[mine], config, device, processes.ranks))
            for i, count in enumerate(counts):
                if count:
                    nats += sum(parts[i * processes.team_size : (i + 1) * processes.team_size]) * count
                    targets += count
    if targets == 0:
        error = ValueError(f"the validation split has no target to predict: it is empty or all {IGNORED}")
        raise processes.fail(error)
    return nats / targets


@contextmanager
def evaluating(model: Trainable) -> Iterator[torch.device]:
    """Turn on eval mode and turn off gradients; at the end, restore the mode and the random state.

    Yields the device of the model.
    """
    device = device_of(model)
    with evaluation_mode(model), torch.no_grad(), own_random_state(device):
        yield device


def _mean_loss(
    model: Trainable, batch: Batch, config: TrainConfig, device: torch.device, ranks: Ranks | None
) -> float:
    """Mean loss over the targets of a batch, which must have one; with `ranks`, the part of this process."""
    if ranks is not None:
        found = segments_of(model, batch, config, device, ranks)
        return found.loss(found.start()).item() / count_targets(batch)
    if config.segment is None:
        return batch_loss(model, batch, config, device).item()
    nats = 0.0
    for piece in pieces(batch, config.segment):
        if piece.inputs.shape[1] > config.segment:
            found = segments_of(model, piece, config, device)
            nats += found.loss(found.start()).item()
        elif count := count_targets(piece):
            nats += batch_loss(model, piece, config, device).item() * count
    return nats / count_targets(batch)


def segments_of(
    model: Trainable, batch: Batch, config: TrainConfig, device: torch.device, ranks: Ranks | None = None
) -> Segments:
    """Cut the rows of a batch into the segments of the config, and take the slices of this process."""
    if ranks is not None:
        batch = slice_of(batch, ranks, config.segment)
    padding = None if batch.key_padding_mask is None else batch.key_padding_mask.to(device)
    moved = Batch(batch.inputs.to(device), batch.targets.to(device), padding)
    length = moved.inputs.shape[1] if config.segment is None else config.segment // config.sequence

    @contextmanager
    def running() -> Iterator[None]:
        shared = nullcontext() if ranks is None else use(ranks)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16), shared:
            yield

    return Segments(cast(Continues, model), moved, length, running)


def batch_loss(model: Trainable, batch: Batch, config: TrainConfig, device: torch.device) -> Tensor:
    """Mean loss over the targets of a batch, in nats per token, under the autocast of the run."""
    loss: Callable[..., Tensor] = model.loss
    inputs, targets = batch.inputs.to(device), batch.targets.to(device)
    masks = {}  # most models take none
    if batch.key_padding_mask is not None:
        masks["key_padding_mask"] = batch.key_padding_mask.to(device)
    if batch.cu_seqlens is not None:  # models take one row
        masks["cu_seqlens"] = batch.cu_seqlens.to(device)
        inputs, targets = inputs.reshape(1, -1), targets.reshape(1, -1)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
        return loss(inputs, targets, **masks)


def only_predicted(model: Trainable, batch: Batch) -> Batch:
    """Hide the targets that the loss of a model does not cover, so that they are not counted."""
    if not isinstance(model, PredictsSome):
        return batch
    return batch._replace(targets=model.predicted(batch.targets, batch.key_padding_mask))


def count_targets(batch: Batch) -> int:
    """Count the targets of a batch that are not ignored."""
    return int((batch.targets != IGNORED).sum())
