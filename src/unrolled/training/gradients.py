"""The gradient of a micro-batch, whole or by segments."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Batch
from unrolled.ops.sequence import Ranks
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import batch_loss, count_targets, segments_of
from unrolled.training.interfaces import Trainable
from unrolled.training.segments import pieces


def add_gradient(
    model: Trainable,
    batch: Batch,
    weight: float,
    config: TrainConfig,
    device: torch.device,
    accumulating: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    last: bool = True,
    state: Any = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Any]:
    """Add the gradient of `weight` times the loss of a micro-batch to the gradients of the parameters.

    Args:
        model: the model to train.
        batch: the micro-batch.
        weight: factor of the mean loss of the batch, such as the share of its targets in the update.
        config: its `segment` and `bf16` are used.
        device: device of the model.
        accumulating: makes a context for forward and backward passes that are not the last of an update.
        last: whether this micro-batch is the last of an update.
        state: the state from which the rows continue; None to start from the empty state.
        ranks: the processes that share the sequences; each adds the part of its slice.

    Returns:
        The weighted loss and the state at the end of the rows, both without a graph. The state is None if
        `state` is.
    """
    scale = weight / max(count_targets(batch), 1)
    if state is not None or ranks is not None:
        found = segments_of(model, batch, config, device, ranks)
        start = found.start() if state is None else state
        loss, end = found.add_gradient(scale, start, accumulating, last=last)
        return loss, None if state is None else end
    if config.segment is None:
        return _whole(model, batch, weight, config, device, nullcontext() if last else accumulating()), None
    cut, losses = list(pieces(batch, config.segment)), []
    for number, piece in enumerate(cut, start=1):
        final = last and number == len(cut)
        if piece.inputs.shape[1] > config.segment:
            found = segments_of(model, piece, config, device)
            loss, _ = found.add_gradient(scale, found.start(), accumulating, last=final)
        else:
            context = nullcontext() if final else accumulating()
            loss = _whole(model, piece, scale * count_targets(piece), config, device, context)
        losses.append(loss)
    return torch.stack(losses).sum(), None


def _whole(
    model: Trainable,
    batch: Batch,
    weight: float,
    config: TrainConfig,
    device: torch.device,
    context: AbstractContextManager[object],
) -> Tensor:
    with context:
        loss = batch_loss(model, batch, config, device) * weight
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
