"""The training loop: any model with a `loss`, any data set with `batch` and `eval_batches`, one folder."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from unrolled.contract import Dataset
from unrolled.folders import held, remove_staging, replacing_files
from unrolled.threads import cpu_threads
from unrolled.training import _steps, checkpoint
from unrolled.training._session import Interrupted, SignalFlag, interrupt_flag, own_random_state
from unrolled.training.checkpoint import TrainState
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import EvaluationStoppedError, evaluate
from unrolled.training.interfaces import Trainable
from unrolled.training.log import RunLog, open_log, progress_bar


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Losses are in nats per token; None if the run ended before its first evaluation.

    If a signal ended the run, it is not complete; `signal` is then its number, such as
    `signal.SIGINT` for Ctrl-C, else None. `seconds` counts every process of the run.
    """

    best_val: float | None
    last_val: float | None
    steps: int
    seconds: float
    signal: int | None = None

    def raise_if_interrupted(self) -> None:
        """Raise `Interrupted`, a KeyboardInterrupt, if a signal ended the run."""
        if self.signal is not None:
            raise Interrupted(self.signal)


def train(
    model: Trainable,
    dataset: Dataset,
    config: TrainConfig,
    run_dir: str | Path,
    *,
    resume: bool = True,
    progress: bool = True,
    tensorboard: bool = False,
    metadata: Mapping[str, object] | None = None,
    on_start: Callable[[bool], object] = lambda resumed: None,
) -> TrainResult:
    """Train a model, or resume where an earlier call on the same folder stopped.

    The folder holds the best weights so far (whatever `model.save` writes), `last.safetensors` to resume
    from, and `log.jsonl`. A run that is killed at any moment and started again ends with the same weights,
    bit for bit, as an uninterrupted one: on a CPU, with the same number of threads; on CUDA, if the kernels
    are deterministic; with `config.seconds`, only if it makes as many steps. On Ctrl-C, SIGTERM and SIGHUP,
    the run finishes its step, writes a checkpoint and returns. An evaluation in progress is aborted, and
    repeated on resume. A second Ctrl-C stops immediately.

    Only one process can train in a folder at a time. The model is trained in place on the device it is on,
    and left with its last weights in eval mode.

    Args:
        model: what to train, such as an `unrolled.models.Decoder`.
        dataset: where batches come from, such as `unrolled.data.load("digits")`.
        config: the settings.
        run_dir: the folder of the run; created if missing.
        resume: resume from `last.safetensors` if there is one; False starts over and replaces it.
        progress: show a progress bar.
        tensorboard: also log to `run_dir/tensorboard`.
        metadata: plain JSON to keep in the checkpoint, such as the options of the data set.
        on_start: called once, after all checks and before any write, with whether the run resumes from a
            checkpoint; use it to add files to the folder.

    Raises:
        ValueError: the folder cannot be written to or another process trains there, or its checkpoint is
            damaged or belongs to another model, config or data set, or a batch has nothing to predict.
        FloatingPointError: a loss or the gradient is not finite; `last.safetensors` holds an earlier step.
        OSError: a file cannot be written, as on a full disk; `last.safetensors` holds an earlier step.
        UnsupportedError: TensorBoard is not installed, or the model cannot recompute activations.
    """
    run_dir = Path(run_dir)
    _steps.fit(model, config)
    device = _steps.device_of(model)
    with own_random_state(device), cpu_threads(config.threads), interrupt_flag() as interrupted:
        # draws a batch first, so that a failure creates no folder
        identity = _steps.identity_of(model, dataset, config)
        _make_folder(run_dir)
        with held(run_dir):
            remove_staging(run_dir)
            state = _steps.begin(model, config)
            run = _Run(state, dataset, config, run_dir, identity, dict(metadata or {}), interrupted)
            resumed = resume and _steps.go_back(run.checkpoint, state, identity, config)
            on_start(resumed)
            run.go(resumed, progress=progress, tensorboard=tensorboard)
    model.eval()
    p = state.progress
    return TrainResult(p.best_val, p.last_val, p.step, p.seconds, interrupted.signal)


@dataclass
class _Run:
    """A run in its folder, which is locked."""

    state: TrainState
    dataset: Dataset
    config: TrainConfig
    run_dir: Path
    identity: Mapping[str, object]
    metadata: dict[str, object]
    interrupted: SignalFlag

    @property
    def checkpoint(self) -> Path:
        return self.run_dir / _steps.CHECKPOINT

    def go(self, resumed: bool, *, progress: bool, tensorboard: bool) -> None:
        """Train to the end, or to a signal, and write a checkpoint."""
        p, config = self.state.progress, self.config
        started = time.perf_counter() - p.seconds

        def count_seconds() -> None:
            p.seconds = time.perf_counter() - started

        def save_checkpoint() -> None:
            count_seconds()
            checkpoint.save(self.checkpoint, self.state, self.identity, self.metadata)

        if not resumed:
            save_checkpoint()  # so that a run killed early restarts from the same weights
        after = p.step if resumed else None
        with (
            open_log(self.run_dir / "log.jsonl", after=after, tensorboard=tensorboard) as log,
            progress_bar(progress) as bar,
        ):
            log.write("resume" if resumed else "start", p.step, config=asdict(config))
            total, unit = (config.steps, "steps") if config.seconds is None else (config.seconds, "s")
            task = bar.add_task("", total=total, completed=int(self._done), unit=unit, loss="-", speed="-")
            self.state.model.train()
            self._evaluate_if_due(log)
            while not config.is_over(p.step, p.seconds) and not self.interrupted.is_set():
                loss = self._step(log)
                count_seconds()
                bar.update(task, completed=self._done, loss=f"{loss:.3f}", speed=f"{p.recent.speed:,.0f}")
                if p.step % config.log_every == 0:
                    p.recent = checkpoint.Recent()
                self._evaluate_if_due(log)
                count_seconds()
                if p.step % config.checkpoint_every == 0:
                    save_checkpoint()
            save_checkpoint()
            if self.interrupted.is_set():
                bar.console.print(f"Stopped after step {p.step}; train again in {self.run_dir} to resume.")

    @property
    def _done(self) -> float:
        p = self.state.progress
        return p.step if self.config.seconds is None else p.seconds

    def _step(self, log: RunLog) -> float:
        """Make one update and count it; return its loss."""
        p, config = self.state.progress, self.config
        began = time.perf_counter()
        lr = self.state.schedule.lr(p.step, p.seconds)
        loss, grad_norm, tokens = _steps.update(self.state, self.dataset, config, lr)
        p.step += 1
        p.recent.add(loss, tokens, time.perf_counter() - began)
        if p.step % config.log_every == 0:
            mean, speed = p.recent.mean_loss, p.recent.speed
            log.write("train", p.step, loss=mean, lr=lr, grad_norm=grad_norm, tokens_per_second=speed)
        return loss

    def _evaluate_if_due(self, log: RunLog) -> None:
        """Evaluate, update the schedule and the log, and save the weights if they are the best so far."""
        p, config, state = self.state.progress, self.config, self.state
        due = p.step % config.eval_every == 0 or config.is_over(p.step, p.seconds)
        if not due or p.evaluated == p.step:
            return
        try:
            p.last_val = evaluate(state.evaluated(), self.dataset, config, stop=self.interrupted.is_set)
        except EvaluationStoppedError:
            return  # it is still due when the run resumes
        if not math.isfinite(p.last_val):
            raise FloatingPointError(f"the validation loss after step {p.step} is {p.last_val}: lower lr")
        if p.step % config.eval_every == 0:  # not the final one, which a longer run would not have
            state.schedule.observe(p.last_val)
        if p.best_val is None or p.last_val < p.best_val:
            p.best_val = p.last_val
            with replacing_files(self.run_dir) as folder:
                state.evaluated().save(folder)
        p.evaluated = p.step
        log.write("eval", p.step, loss=p.last_val, bits=p.last_val / math.log(2), best=p.best_val)


def _make_folder(folder: Path) -> None:
    """Create the folder of a run, if it does not exist.

    Raises:
        ValueError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir {folder} cannot be written to: {error.strerror}") from error
