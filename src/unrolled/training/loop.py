"""The training loop: any model with a `loss`, any data set with `batch` and `eval_batches`, one folder."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unrolled.contract import IGNORED, UnsupportedError
from unrolled.training import checkpoint
from unrolled.training._files import prepare_folder, replacing_files
from unrolled.training._session import cpu_threads, interrupt_flag, own_random_state
from unrolled.training.checkpoint import TrainState
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import batch_loss, count_targets, evaluate
from unrolled.training.interfaces import Trainable, TrainingData
from unrolled.training.log import RunLog, open_log, progress_bar
from unrolled.training.optim import Schedule, build_optimizer


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Losses are in nats per token; None if Ctrl-C came before the first evaluation.

    `steps` is below the steps asked for if Ctrl-C ended the run. `seconds` counts every process of the run.
    """

    best_val: float | None
    last_val: float | None
    steps: int
    seconds: float


def train(
    model: Trainable,
    dataset: TrainingData,
    config: TrainConfig,
    run_dir: str | Path,
    *,
    resume: bool = True,
    progress: bool = True,
    tensorboard: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a model, or go on where an earlier call on the same folder stopped.

    The folder holds the best weights so far (whatever `model.save` writes), `last.safetensors` to resume
    from, and `log.jsonl`. A run that is killed at any moment and started again ends with the same weights,
    bit for bit, as one left alone: on a CPU with the same number of threads; on CUDA where the kernels are
    deterministic. Ctrl-C finishes the step, writes a checkpoint and returns; a second one stops at once.

    The model is trained in place on the device it is on, and left with its last weights in eval mode.

    Args:
        model: what to train, such as an `unrolled.models.Decoder`.
        dataset: where batches come from, such as `unrolled.data.load("digits")`.
        config: the settings.
        run_dir: the folder of the run; made if need be.
        resume: go on from `last.safetensors` if there is one; False starts over and replaces it.
        progress: show a progress bar.
        tensorboard: also log to `run_dir/tensorboard`.
        metadata: plain JSON to keep in the checkpoint, such as how to make the data set again.

    Raises:
        ValueError: the folder cannot be written to, or its checkpoint is damaged or belongs to another
            model, config or data set, or a batch has nothing to predict.
        FloatingPointError: a loss or the gradient is not finite; `last.safetensors` holds an earlier step.
        UnsupportedError: TensorBoard is not installed, or the model cannot recompute activations.
    """
    run_dir = Path(run_dir)
    if config.gradient_checkpointing:
        if not hasattr(model, "gradient_checkpointing"):
            name = type(model).__name__
            raise UnsupportedError(f"{name} cannot recompute activations: use gradient_checkpointing=False")
        model.gradient_checkpointing = True
    prepare_folder(run_dir)
    device = next(model.named_parameters())[1].device
    optimizer = build_optimizer(model.named_parameters(), config)
    state = TrainState(model, optimizer, Schedule(config), device)
    with own_random_state(device), cpu_threads(config.threads), interrupt_flag() as interrupted:
        torch.manual_seed(config.seed)
        path = run_dir / "last.safetensors"
        identity = _identity(model, dataset, config)
        resumed = resume and path.exists()
        if resumed:
            free = frozenset(f"train.{x}" for x in config.free_on_resume())
            resumed = checkpoint.load(path, state, identity, free)
        p = state.progress
        if p.step > config.steps:
            raise ValueError(f"steps is {config.steps}, but {path} is already at step {p.step}")
        started = time.perf_counter() - p.seconds

        def save_checkpoint() -> None:
            p.seconds = time.perf_counter() - started
            checkpoint.save(path, state, identity, metadata or {})

        if not resumed:
            save_checkpoint()  # so that a run killed early starts again from these very weights
        after = p.step if resumed else None
        with (
            open_log(run_dir / "log.jsonl", after=after, tensorboard=tensorboard) as log,
            progress_bar(progress) as bar,
        ):
            log.write("resume" if resumed else "start", p.step, config=asdict(config))
            task = bar.add_task("", total=config.steps, completed=p.step, loss="-", speed="-")
            model.train()
            while p.step < config.steps and not interrupted.is_set():
                began = time.perf_counter()
                lr = state.schedule.lr(p.step)
                loss, grad_norm, tokens = _update(state, dataset, config, lr)
                p.step += 1
                p.recent.add(loss, tokens, time.perf_counter() - began)
                bar.update(task, completed=p.step, loss=f"{loss:.3f}", speed=f"{p.recent.speed:,.0f}")
                if p.step % config.log_every == 0:
                    mean, speed = p.recent.mean_loss, p.recent.speed
                    log.write("train", p.step, loss=mean, lr=lr, grad_norm=grad_norm, tokens_per_second=speed)
                    p.recent = checkpoint.Recent()
                if p.step % config.eval_every == 0 or p.step == config.steps:
                    _evaluate(state, dataset, config, run_dir, log)
                if p.step % config.checkpoint_every == 0:
                    save_checkpoint()
            save_checkpoint()
            if p.step < config.steps:
                bar.console.print(f"Stopped after step {p.step}; train again in {run_dir} to go on.")
    model.eval()
    return TrainResult(p.best_val, p.last_val, p.step, p.seconds)


def _update(
    state: TrainState, dataset: TrainingData, config: TrainConfig, lr: float
) -> tuple[float, float, int]:
    """Make one optimiser step; return the loss, the norm of the gradient and the number of targets."""
    step = state.progress.step
    batches = [
        dataset.batch("train", step=micro_step, batch_size=config.batch_size, seed=config.seed)
        for micro_step in range(step * config.accumulate, (step + 1) * config.accumulate)
    ]
    counts = [count_targets(batch) for batch in batches]
    targets = sum(counts)
    if targets == 0:
        raise ValueError(f"the training batch of step {step + 1} has no target to predict: all are {IGNORED}")
    state.optimizer.zero_grad()  # before, since a caller may bring a model with gradients on it
    parts = []
    for batch, count in zip(batches, counts, strict=True):
        if count:
            # weighed by targets, the sum is the mean over the large batch that is accumulated
            loss = batch_loss(state.model, batch, config, state.device) * (count / targets)
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(loss.detach())
    total = torch.stack(parts).sum()
    parameters = [x for group in state.optimizer.param_groups for x in group["params"]]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or math.inf)
    if not math.isfinite(total) or not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the loss of step {step + 1} is {total:g} with a gradient of norm {grad_norm:g} at lr {lr:g}: "
            "lower lr, raise warmup_steps or set clip_norm"
        )
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.optimizer.step()
    return total.item(), grad_norm.item(), targets


def _evaluate(
    state: TrainState, dataset: TrainingData, config: TrainConfig, run_dir: Path, log: RunLog
) -> None:
    """Evaluate, tell the schedule and the log, and keep the weights if they are the best so far."""
    p = state.progress
    p.last_val = evaluate(state.model, dataset, config)
    if not math.isfinite(p.last_val):
        raise FloatingPointError(f"the validation loss after step {p.step} is {p.last_val}: lower lr")
    if p.step % config.eval_every == 0:  # not the one at the end, which a longer run would not have
        state.schedule.observe(p.last_val)
    if p.best_val is None or p.last_val < p.best_val:
        p.best_val = p.last_val
        with replacing_files(run_dir) as folder:
            state.model.save(folder)
    log.write("eval", p.step, loss=p.last_val, bits=p.last_val / math.log(2), best=p.best_val)


def _identity(model: Trainable, dataset: TrainingData, config: TrainConfig) -> dict[str, Any]:
    """Describe what must be the same for a checkpoint to be resumed; the data by their first batch."""
    first = dataset.batch("train", step=0, batch_size=config.batch_size, seed=config.seed)
    data = {"first_batch": checkpoint.fingerprint(first.inputs, first.targets)}
    return {"train": config.identity(), "model": asdict(model.config), "data": data}
