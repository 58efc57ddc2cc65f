"""A forecast of memory and time of a run, from a few steps whose results are discarded."""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median

from torch import Tensor

from unrolled.contract import Dataset
from unrolled.ops.state import nbytes
from unrolled.training import _steps
from unrolled.training.checkpoint import TrainState
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import evaluate
from unrolled.training.interfaces import Trainable, device_of
from unrolled.training.memory import begin_peak, peak_bytes
from unrolled.training.spread import local
from unrolled.training.utilisation import flops_per_token, speed_of_products
from unrolled.training.watch import Taken, watched

STEPS = 10
WATCHED = 2  # the third step: the first steps also allocate memory that is kept


@dataclass(frozen=True)
class Forecast:
    """The memory that a run needs on this process, and its time.

    Attributes:
        processes: number of processes.
        parameters: number of parameters; shared parameters count once.
        weight_bytes: bytes of the parameters, or of the part of them that this process has.
        gradient_bytes: bytes of the gradients; frozen parameters have none.
        optimizer_bytes: bytes of the optimiser's state and of the averaged weights.
        carried_bytes: bytes of the states that are carried from batch to batch.
        taken: memory for activations and for states between segments in a step, and bytes sent to other
            processes, all measured in the third step, or in the last step if there are fewer. None if this
            step was not run.
        peak_bytes: peak memory, including activations: on a CPU, of the whole process with Python, torch and
            the data set; on CUDA, of torch. None where the system does not report it.
        step: first step; above 0 if the run resumes from a checkpoint.
        steps: last step; an estimate if `config.seconds` is set.
        measured: number of steps measured.
        tokens: tokens that the model reads per step, or targets if its inputs are not tokens; a mean over the
            measured steps.
        mfu: the share of the processors' speed that a step uses (`unrolled.training.utilisation`); None if no
            step is left, the inputs are not tokens, or `config.clock` is "cpu".
        step_seconds: median time of a step; 0 if none is left. All times are on the clock of `config`.
        evaluations: number of evaluations that are left.
        evaluation_seconds: time of one evaluation: the time of its first batch times the number of batches.
    """

    processes: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    carried_bytes: int
    taken: Taken | None
    peak_bytes: int | None
    step: int
    steps: int
    measured: int
    tokens: float
    mfu: float | None
    step_seconds: float
    evaluations: int
    evaluation_seconds: float

    @property
    def seconds(self) -> float:
        """Time of all remaining steps and evaluations, without the writing of checkpoints."""
        steps_left = self.steps - self.step
        return steps_left * self.step_seconds + self.evaluations * self.evaluation_seconds


def dry_run(
    model: Trainable,
    dataset: Dataset,
    config: TrainConfig,
    run_dir: str | Path | None = None,
    *,
    resume: bool = True,
) -> Forecast:
    """Run the first ten steps of `train` and one batch of an evaluation, without writing files.

    The model is left in eval mode, with the weights after the last of these steps. Several processes call
    this function together, like `train`. Each gets its own memory, and the time of the first process.

    Args:
        model: as for `train`.
        dataset: as for `train`.
        config: as for `train`.
        run_dir: the folder of the run, which is only read. If it has a checkpoint, the dry run starts there.
        resume: False starts from step 0 even if there is a checkpoint.

    Raises:
        ValueError: the checkpoint is damaged or belongs to another model, config or data set, or a batch has
            nothing to predict, or the batches or the weights cannot be divided evenly among the processes.
        FloatingPointError: a loss or the gradient is not finite.
        UnsupportedError: as for `train`.
        ElsewhereError: another process of the run failed.
    """
    device = device_of(model)
    with _steps.together(model, dataset, config) as (processes, identity):
        with processes.agreed():
            state = _steps.begin(model, config, processes)
        if resume and run_dir is not None:
            _steps.go_back(Path(run_dir), state, identity, config)
        progress = state.progress
        first = progress.step
        watched_step = WATCHED if config.seconds is not None else min(WATCHED, config.steps - first - 1)
        taken: Taken | None = None
        seconds: list[float] = []
        tokens: list[int] = []
        flops = 0
        processors = processes.sum([speed_of_products(device, bf16=config.bf16)])[0]
        begin_peak(device)  # without the matrices of this measurement, or an earlier run
        model.train()
        while len(seconds) < STEPS and not config.is_over(progress.step, progress.seconds + sum(seconds)):
            began = config.now()
            with watched(state) if len(seconds) == watched_step else nullcontext() as taken_now:
                done = _steps.update(state, dataset, config, state.schedule.lr(progress.step))
            taken = taken_now or taken
            seconds.append(processes.from_first(config.now() - began))
            tokens.append(done.read or done.targets)
            flops += done.read * flops_per_token(model)
            progress.step += 1
        model.eval()
        evaluation_seconds = _evaluation_seconds(state, dataset, config) if seconds else 0.0
        step_seconds, steps = median(seconds or [0.0]), config.steps
        if config.seconds is not None:
            each = step_seconds + evaluation_seconds / config.eval_every
            steps = first + (max(1, round((config.seconds - progress.seconds) / each)) if seconds else 0)
    parameters = [x for _, x in model.named_parameters()]
    moments = [
        x for optimizer in state.optimizers for kept in optimizer.state.values() for x in kept.values()
    ]
    averages = [] if state.averaged is None else [x for _, x in state.averaged.named_parameters()]
    return Forecast(
        processes=processes.size,
        parameters=sum(x.numel() for x in parameters),
        weight_bytes=_nbytes(parameters),
        gradient_bytes=_nbytes(x for x in parameters if x.requires_grad),
        optimizer_bytes=_nbytes(x for x in [*moments, *averages] if isinstance(x, Tensor)),
        carried_bytes=0 if state.carried is None else nbytes(state.carried),
        taken=taken,
        peak_bytes=peak_bytes(device),
        step=first,
        steps=steps,
        measured=len(seconds),
        tokens=mean(tokens or [0]),
        mfu=flops / len(seconds) / step_seconds / processors if flops and config.clock == "wall" else None,
        step_seconds=step_seconds,
        evaluations=_evaluations(first, steps, config.eval_every),
        evaluation_seconds=evaluation_seconds,
    )


def _evaluations(step: int, steps: int, every: int) -> int:
    """Return the number of evaluations after a step: at every multiple of `every`, and at the end."""
    if step == steps:
        return 0
    return steps // every - step // every + (steps % every != 0)


def _evaluation_seconds(state: TrainState, dataset: Dataset, config: TrainConfig) -> float:
    """Estimate the time of an evaluation from its first batches, one for each team of processes."""
    processes = state.processes
    batches = sum(1 for _ in islice(dataset.eval_batches(config.batch_size), config.eval_batches))
    began = config.now()
    evaluate(state.model, dataset, replace(config, eval_batches=processes.teams), processes=processes)
    took = processes.from_first(config.now() - began)
    return took * math.ceil(batches / processes.teams)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(x).nbytes for x in tensors)
