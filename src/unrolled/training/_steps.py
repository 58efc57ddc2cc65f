"""The parts of a run that write no files: start, resume from a checkpoint, and step."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from unrolled.contract import IGNORED, Dataset, UnsupportedError
from unrolled.ops.random_features import Projection
from unrolled.training import checkpoint
from unrolled.training.averaging import average, averaged_copy
from unrolled.training.checkpoint import TrainState
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import count_targets
from unrolled.training.gradients import add_gradient
from unrolled.training.interfaces import Recomputes, Trainable
from unrolled.training.optim import Schedule, build_optimizers
from unrolled.training.segments import check_continues

CHECKPOINT = "last.safetensors"


def begin(model: Trainable, config: TrainConfig) -> TrainState:
    """Make the optimisers and the schedule, and seed torch's random generators."""
    torch.manual_seed(config.seed)
    averaged = None if config.ema is None else averaged_copy(model)
    return TrainState(model, build_optimizers(model, config), Schedule(config), device_of(model), averaged)


def device_of(model: Trainable) -> torch.device:
    """Return the device of the first parameter."""
    return next(model.named_parameters())[1].device


def go_back(path: Path, state: TrainState, identity: Mapping[str, object], config: TrainConfig) -> bool:
    """Go back to the checkpoint, if there is one that fits."""
    if not path.exists():
        return False
    free = frozenset(f"train.{x}" for x in config.free_on_resume())
    resumed = checkpoint.load(path, state, identity, free)
    if config.seconds is None and (step := state.progress.step) > config.steps:
        raise ValueError(f"steps is {config.steps}, but {path} is already at step {step}")
    return resumed


def fit(model: Trainable, config: TrainConfig) -> None:
    """Check that the model can be trained as the config asks for; turn on what it asks for.

    Raises:
        UnsupportedError: the model cannot recompute activations, or has no state to go on from.
    """
    if config.segment is not None:
        check_continues(model)
    if config.gradient_checkpointing:
        if not isinstance(model, Recomputes):
            name = type(model).__name__
            raise UnsupportedError(f"{name} cannot recompute activations: use gradient_checkpointing=False")
        model.gradient_checkpointing = True


def update(state: TrainState, dataset: Dataset, config: TrainConfig, lr: float) -> tuple[float, float, int]:
    """Make one optimiser step; return the loss, the norm of the gradient and the number of targets."""
    step = state.progress.step
    if config.redraw_every is not None:
        _redraw(state.model, step, config.redraw_every)
    batches = [
        dataset.batch("train", step=micro_step, batch_size=config.batch_size, seed=config.seed)
        for micro_step in range(step * config.accumulate, (step + 1) * config.accumulate)
    ]
    counts = [count_targets(batch) for batch in batches]
    targets = sum(counts)
    if targets == 0:
        raise ValueError(f"the training batch of step {step + 1} has no target to predict: all are {IGNORED}")
    for optimizer in state.optimizers:  # before, since a caller may bring a model with gradients on it
        optimizer.zero_grad()
    parts = []
    for batch, count in zip(batches, counts, strict=True):
        if count:
            # weighed by targets, the sum is the mean over the large batch that is accumulated
            parts.append(add_gradient(state.model, batch, count / targets, config, state.device))
    total = torch.stack(parts).sum()
    parameters = [x for optimizer in state.optimizers for g in optimizer.param_groups for x in g["params"]]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or math.inf)
    if not math.isfinite(total) or not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the loss of step {step + 1} is {total:g} with a gradient of norm {grad_norm:g} at lr {lr:g}: "
            "lower lr, raise warmup_steps or set clip_norm"
        )
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    if state.averaged is not None and config.ema is not None:
        average(state.averaged, state.model, config.ema, step + 1)
    return total.item(), grad_norm.item(), targets


def _redraw(model: Trainable, step: int, every: int) -> None:
    """Draw the rows of random features again, if it is time; which ones follows from their saved seeds."""
    projections = [module for module in model.modules() if isinstance(module, Projection)]
    if not projections:
        raise ValueError("redraw_every is set, but the model has no random features: use performer or rfa")
    if step and step % every == 0:
        for projection in projections:
            projection.redraw()


def identity_of(model: Trainable, dataset: Dataset, config: TrainConfig) -> dict[str, object]:
    """Describe what must be the same for a checkpoint to be resumed; the data by their first batch."""
    first = dataset.batch("train", step=0, batch_size=config.batch_size, seed=config.seed)
    data = {"first_batch": checkpoint.fingerprint(first.inputs, first.targets)}
    return {"train": asdict(config), "model": asdict(model.config), "data": data}
