"""The parts of a run that write no files: start, resume from a checkpoint, and step."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, is_dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from unrolled.alignment.base import Alignment
from unrolled.contract import IGNORED, Batch, Dataset, UnsupportedError
from unrolled.ops.random_features import Projection
from unrolled.threads import cpu_threads
from unrolled.training import checkpoint
from unrolled.training._session import own_random_state
from unrolled.training._shares import check_divisible, shares
from unrolled.training.averaging import average, averaged_copy, check_averaged, tensors_of
from unrolled.training.carrying import check_carried, entering
from unrolled.training.checkpoint import TrainState
from unrolled.training.compiling import compiled
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import count_targets, only_predicted
from unrolled.training.gradients import add_gradient
from unrolled.training.interfaces import Recomputes, Trainable, device_of
from unrolled.training.optim import Schedule, build_optimizers
from unrolled.training.processes import Processes, joined
from unrolled.training.segments import Continues, check_continues
from unrolled.training.slices import check_slices, teams
from unrolled.training.spread import spread, whole


@contextmanager
def together(
    model: Trainable, dataset: Dataset, config: TrainConfig
) -> Iterator[tuple[Processes, dict[str, object]]]:
    """Join the processes of a run, and check that they can train this model together.

    Yields the processes, and what must be the same for a checkpoint to be resumed (`identity_of`). At the
    end, the caller's number of threads and torch's random state are restored.

    Raises:
        ValueError: the model lacks what `Trainable` has, the batches or the weights cannot be divided evenly
            among the processes, the processes were given different models, configs or data, or as `fit`.
        UnsupportedError: as `fit` and `compiled`.
        ElsewhereError: another process failed.
    """
    with (
        joined() as everyone,
        everyone.losing_others(),
        own_random_state(device_of(model)),
        cpu_threads(config.threads),
    ):
        with everyone.agreed():
            _check_trainable(model)
            check_divisible(config, everyone)
            identity = identity_of(model, dataset, config)
        check_same(model, identity, everyone)
        with teams(everyone, config) as processes, ExitStack() as stack:
            with processes.agreed():
                fit(model, dataset, config, processes)
                if config.compile:
                    stack.enter_context(compiled(model))
            yield processes, identity


def _check_trainable(model: object) -> None:
    """Raise ValueError if a module lacks what `Trainable` adds to a `torch.nn.Module`."""
    config = getattr(model, "config", None)
    methods = [getattr(model, name, None) for name in ("loss", "save")]
    if not all(map(callable, methods)) or not is_dataclass(config) or isinstance(config, type):
        raise ValueError(
            f"model is a {type(model).__name__}, but must have loss(inputs, targets), save(folder) and a "
            "dataclass config"
        )
    try:
        json.dumps(asdict(config))
    except TypeError as error:
        raise ValueError(f"config of this {type(model).__name__} must hold JSON values: {error}") from error


def begin(model: Trainable, config: TrainConfig, processes: Processes) -> TrainState:
    """Make the optimisers and the schedule, seed torch's random generators, and spread the model.

    Raises:
        UnsupportedError: the optimiser cannot train a sharded model, or this torch cannot shard one.
    """
    torch.manual_seed(config.seed)
    device = device_of(model)
    for x in tensors_of(model).values():
        processes.copy_from_first(x.detach())
    averaged = None if config.ema is None else averaged_copy(model)
    spreading = spread(model, averaged, config, processes, device)
    optimizers = build_optimizers(model, config)
    return TrainState(model, optimizers, Schedule(config), device, spreading, processes, averaged)


def go_back(run_dir: Path, state: TrainState, identity: Mapping[str, object], config: TrainConfig) -> bool:
    """Restore the last checkpoint in the folder of a run, if there is one; return whether it was restored.

    Raises:
        ValueError: as `checkpoint.load`, or the checkpoint is beyond the last step of `config`.
    """
    free = frozenset(f"train.{x}" for x in config.free_on_resume())
    resumed = checkpoint.load(run_dir, state, identity, free)
    if config.seconds is None and (step := state.progress.step) > config.steps:
        error = ValueError(f"steps is {config.steps}, but {run_dir} is already at step {step}")
        raise state.processes.fail(error)
    return resumed


def fit(model: Trainable, dataset: Dataset, config: TrainConfig, processes: Processes) -> None:
    """Check that the model supports the options of the config, and turn on gradient checkpointing if set.

    Raises:
        UnsupportedError: the model cannot recompute activations, has no state to continue from, cannot read
            slices, or has hard attention, which its loss does not train; or the data are packed sequences,
            but `sequence` is above 1, or `segment` is set and `shard` is above 1.
        ValueError: `carry_state` is set, but the rows of the data do not continue from batch to batch; or
            `redraw_every` is set, but the model has nothing to redraw; or `ema` is set, but weights have 16
            bits.
    """
    first = dataset.batch("train", step=0, batch_size=config.batch_size, seed=config.seed)
    if config.segment is not None:
        check_continues(model)
        if config.shard > 1 and first.cu_seqlens is not None:  # processes would gather weights out of step
            raise UnsupportedError("packed sequences need shard=1 to be read in segments")
    if config.carry_state:
        check_carried(model, first)
    for module in model.modules():
        if isinstance(module, Alignment) and not module.differentiable:
            raise UnsupportedError(
                f"the loss does not train {type(module).__name__}: use hard.StraightThroughAttention, or "
                "hard.reinforce_loss in a loop of your own"
            )
    if config.redraw_every is not None and not _projections(model):
        raise ValueError(
            "redraw_every is set, but the model has no random features or rotations: use performer, rfa, "
            "reformer or clustered"
        )
    if config.ema is not None:
        check_averaged(model)
    if processes.ranks is not None:
        check_slices(model, first, config, processes.ranks)
    if config.gradient_checkpointing:
        if not isinstance(model, Recomputes):
            name = type(model).__name__
            raise UnsupportedError(f"{name} cannot recompute activations: use gradient_checkpointing=False")
        model.gradient_checkpointing = True


class Update(NamedTuple):
    """The result of an optimiser step.

    Attributes:
        loss: mean over the targets, in nats.
        grad_norm: norm of the whole gradient before clipping.
        targets: number of targets, on all processes.
        read: number of tokens that the model has read, on all processes; 0 if its inputs are not tokens.
        sums: what `tell` returned, added up over the processes.
    """

    loss: float
    grad_norm: float
    targets: int
    read: int
    sums: list[float]


def update(
    state: TrainState,
    dataset: Dataset,
    config: TrainConfig,
    lr: float,
    tell: Callable[[], list[float]] = list,
) -> Update:
    """Make one optimiser step, each process with its share of the batches.

    What `tell` returns is summed together with the loss, in the only all-reduce of an update besides that of
    the gradients.
    """
    step, processes = state.progress.step, state.processes
    if config.redraw_every is not None:
        _redraw(state.model, step, config.redraw_every)
    if not processes.alone:
        torch.manual_seed(_seed(config.seed, step, processes.rank))
    batches = [
        dataset.batch("train", step=micro_step, batch_size=config.batch_size, seed=config.seed)
        for micro_step in range(step * config.accumulate, (step + 1) * config.accumulate)
    ]
    batches = [only_predicted(state.model, batch) for batch in batches]
    own, whole_batches = shares(batches, processes, in_rows=config.carry_state)
    if not own:
        raise processes.fail(
            ValueError(f"the training batch of step {step + 1} has no target to predict: all are {IGNORED}")
        )
    for optimizer in state.optimizers:  # first, since the model of a caller may have gradients already
        optimizer.zero_grad()
    counters = _counters(state.model) if whole_batches else []
    before = [int(x) for x in counters]
    parts = []
    model, accumulating = state.spread.model, state.spread.accumulating
    for number, (batch, weight) in enumerate(own, start=1):
        # weighted by targets, so that the sum is the mean over the whole accumulated batch
        last = number == len(own)
        start = entering(cast(Continues, state.model), batch, state.carried) if config.carry_state else None
        loss, state.carried = add_gradient(
            model,
            batch,
            weight,
            config,
            state.device,
            accumulating,
            last=last,
            state=start,
            ranks=processes.ranks,
        )
        parts.append(loss)
    once = processes.rank % processes.team_size == 0  # a team makes the same passes, which count once
    counted = [(int(x) - b) * once for x, b in zip(counters, before, strict=True)]
    total, *sums = processes.sum([torch.stack(parts).sum().item(), *counted, *tell()])
    for x, b, count in zip(counters, before, sums[: len(counted)], strict=True):
        x.fill_(b + int(count))
    parameters = [x for optimizer in state.optimizers for g in optimizer.param_groups for x in g["params"]]
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or math.inf)).item()
    if not math.isfinite(total) or not math.isfinite(grad_norm):
        raise processes.fail(
            FloatingPointError(
                f"the loss of step {step + 1} is {total:g} with a gradient of norm {grad_norm:g} at lr "
                f"{lr:g}: lower lr, raise warmup_steps or set clip_norm"
            )
        )
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    if state.averaged is not None and config.ema is not None:
        average(state.averaged, state.model, config.ema, step + 1)
    targets = sum(map(count_targets, batches))
    read = sum(x.inputs.numel() for x in batches if _holds_tokens(x, dataset))
    return Update(total, grad_norm, targets, read, sums[len(counted) :])


def _holds_tokens(batch: Batch, dataset: Dataset) -> bool:
    """Whether each input is a token with a target; two sentences of a translation may have equal lengths."""
    of_tokens = getattr(dataset, "task", "tokens") == "tokens"
    return of_tokens and batch.inputs.shape == batch.targets.shape


def _seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of dropout for an update, which differs between processes."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8])


def _counters(model: Trainable) -> list[Tensor]:
    """Return the buffers that count forward passes; each process only counts its own passes."""
    return [
        x
        for x in tensors_of(model).values()
        if x.numel() == 1 and not x.is_floating_point() and x.dtype != torch.bool
    ]


def _redraw(model: Trainable, step: int, every: int) -> None:
    """Redraw random features and rotations if they are due at this step; saved seeds determine them."""
    if step and step % every == 0:
        for projection in _projections(model):
            projection.redraw()


def _projections(model: Trainable) -> list[Projection]:
    return [module for module in model.modules() if isinstance(module, Projection)]


def identity_of(model: Trainable, dataset: Dataset, config: TrainConfig) -> dict[str, object]:
    """Describe what must be the same for a checkpoint to be resumed.

    The first batches stand for a data set without an `ids_checksum`.
    """
    first = dataset.batch("train", step=0, batch_size=config.batch_size, seed=config.seed)
    data: dict[str, object] = {"options": _options(dataset), "first_batch": _checksum(first)}
    data["ids_checksum"] = getattr(dataset, "ids_checksum", None)
    for batch in islice(dataset.eval_batches(config.batch_size), 1):
        data["first_eval_batch"] = _checksum(batch)
    return {"train": asdict(config), "model": asdict(model.config), "data": data}


def _options(dataset: Dataset) -> dict[str, object]:
    """Return the options of a data set, without the places of its files, which may move."""
    options: dict[str, object] = dict(getattr(dataset, "options", {}))
    for name in ("path", "val_path", "data_dir"):
        place = options.pop(name, None)
        if isinstance(place, dict):  # several corpora with their weights
            options["weights"] = list(place.values())
    return options


def _checksum(batch: Batch) -> str:
    return checkpoint.fingerprint(*(x for x in batch if x is not None))


def check_same(model: Trainable, identity: Mapping[str, object], processes: Processes) -> None:
    """Raise ValueError on a process whose model, config or data differ from those of the first."""
    tensors = {name: f"{x.dtype} {list(x.shape)}" for name, x in tensors_of(model).items()}
    own = checkpoint.flatten({**identity, "tensors": tensors})
    first = processes.from_first(own)
    with processes.agreed():
        for name in sorted(own.keys() | first.keys()):
            if own.get(name) != first.get(name):
                raise ValueError(
                    f"the processes of a run must be given the same, but {name} is {first.get(name)!r} on "
                    f"process 0 and {own.get(name)!r} on process {processes.rank}"
                )
