"""The loss of a batch and of the validation split."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Dataset
from unrolled.training._session import own_random_state
from unrolled.training.config import TrainConfig
from unrolled.training.interfaces import Trainable
from unrolled.training.segments import Continues, Segments, pieces


class EvaluationStoppedError(Exception):
    """An evaluation was stopped before its end."""


def evaluate(
    model: Trainable, dataset: Dataset, config: TrainConfig, *, stop: Callable[[], bool] = lambda: False
) -> float:
    """Mean loss over all targets of the validation split, in nats per token.

    Each batch counts by its number of targets, so the result does not depend on the batch size. Runs in eval
    mode, under the autocast of training, and leaves torch's random generators as they were.

    Args:
        model: in any mode, which is restored.
        dataset: its `eval_batches` are evaluated.
        config: batch size and number of batches.
        stop: called before each batch; True stops the evaluation.

    Raises:
        EvaluationStoppedError: `stop` returned True.
        ValueError: there is no target to predict.
    """
    nats, targets = 0.0, 0
    with evaluating(model) as device:
        for batch in islice(dataset.eval_batches(config.batch_size), config.eval_batches):
            if stop():
                raise EvaluationStoppedError
            for piece in [batch] if config.segment is None else pieces(batch, config.segment):
                if count := count_targets(piece):
                    nats += _nats(model, piece, config, device, count)
                    targets += count
    if targets == 0:
        raise ValueError(f"the validation split has no target to predict: it is empty or all {IGNORED}")
    return nats / targets


@contextmanager
def evaluating(model: Trainable) -> Iterator[torch.device]:
    """Use eval mode and no gradients, restore the mode and the random state; yield the model's device."""
    device = next(model.named_parameters())[1].device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), own_random_state(device):
            yield device
    finally:
        model.train(was_training)


def _nats(model: Trainable, batch: Batch, config: TrainConfig, device: torch.device, count: int) -> float:
    """Sum of the losses of the `count` targets of a batch, without a graph."""
    if config.segment is None or batch.inputs.shape[1] <= config.segment:
        return batch_loss(model, batch, config, device).item() * count
    found = segments_of(model, batch, config, device)
    return found.loss(found.start()).item()


def segments_of(model: Trainable, batch: Batch, config: TrainConfig, device: torch.device) -> Segments:
    """Cut the rows of a batch into segments, as the run says."""
    padding = None if batch.key_padding_mask is None else batch.key_padding_mask.to(device)
    moved = Batch(batch.inputs.to(device), batch.targets.to(device), padding)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=config.bf16)
    return Segments(cast(Continues, model), moved, config.segment or moved.inputs.shape[1], autocast)


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


def count_targets(batch: Batch) -> int:
    """Count the targets of a batch that are not ignored."""
    return int((batch.targets != IGNORED).sum())
