"""The training loop: any `Trainable` model, any data set with `batch` and `eval_batches`, one folder."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from unrolled.contract import Dataset
from unrolled.folders import held, remove_staging, replacing_files
from unrolled.training import _steps, checkpoint
from unrolled.training._session import STOPPING, Interrupted, SignalFlag, interrupt_flag
from unrolled.training.checkpoint import TrainState
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import EvaluationStoppedError, evaluate
from unrolled.training.interfaces import Trainable
from unrolled.training.log import OnLine, RunLog, SilentLog, open_log, progress_bar, read_log, summary_writer
from unrolled.training.memory import begin_peak, peak_bytes
from unrolled.training.utilisation import flops_per_token, speed_of_products


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Losses are in nats per token; None if the run ended before its first evaluation.

    If a signal ended the run, it is not complete, and `signal` is the number of the signal, such as
    `signal.SIGINT` for Ctrl-C; else `signal` is None. `seconds` is the time of the whole run, including
    earlier calls that were resumed, on the `clock` of its config.
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
    outdated: Iterable[str] = (),
    on_line: OnLine = lambda line: None,
) -> TrainResult:
    """Train a model, or resume where an earlier call on the same folder stopped.

    The folder holds the best weights so far (whatever `model.save` writes), the checkpoint
    `last.safetensors`, and `log.jsonl`. A run that is killed at any moment and started again ends with the
    same weights, bit for bit, as an uninterrupted run: on a CPU, if the number of threads is the same; on
    CUDA, if the kernels are deterministic; with `config.seconds`, only if the number of steps is the same.
    On Ctrl-C, SIGTERM and SIGHUP, the run finishes its step, writes a checkpoint and returns. An evaluation
    in progress is aborted, and repeated on resume. A second Ctrl-C stops immediately.

    Only one run can train in a folder at a time. The model is trained in place on the device it is on,
    and left with its last weights in eval mode.

    Several processes that torchrun has started, or that share torch's process group, train one model: each
    calls this function with the same arguments. `batch_size` is the total over all processes. A run may be
    resumed on another number of processes; its losses are then equal up to rounding and dropout. Only the
    first process writes files and calls `on_start`. If one process fails, the others raise `ElsewhereError`.
    With `config.shard` above 1, the model is left sharded: its parameters are DTensors.

    Args:
        model: what to train, such as an `unrolled.models.Decoder`.
        dataset: where batches come from, such as `unrolled.data.load("digits")`.
        config: the settings.
        run_dir: the folder of the run; created if missing.
        resume: resume from `last.safetensors` if there is one; False starts over and replaces it.
        progress: show a progress bar.
        tensorboard: also log to `run_dir/tensorboard`.
        metadata: plain JSON to keep in the checkpoint, such as the options of the data set.
        on_start: called as `on_start(resumed)`, once, after all checks and before any file is written;
            `resumed` says whether the run resumes from a checkpoint. Use it to add files to the folder.
        outdated: names of files in the folder that hold the model of an earlier run. They are removed once
            this run has written a checkpoint, unless it has already saved its own model.
        on_line: called on the first process with each line of the log, a dict with "event" and "step"; use it
            to send the log to a tracker of experiments.

    Raises:
        ValueError: the folder cannot be written to, or another process trains in it; its checkpoint is
            damaged, or belongs to another model, config or data set; the config does not suit the model or
            the data set; a batch has nothing to predict; the batches or the weights cannot be divided evenly
            among the processes.
        FloatingPointError: a loss or the gradient is not finite; `last.safetensors` holds an earlier step.
        OSError: a file cannot be written, as on a full disk; `last.safetensors` holds an earlier step.
        UnsupportedError: TensorBoard is not installed; the model cannot recompute activations, carry a state,
            run in segments or slices, or be compiled, but the config asks for it; or this torch cannot shard
            it, or has no Muon.
        ElsewhereError: another process of the run failed.
    """
    run_dir = Path(run_dir)
    with (
        _steps.together(model, dataset, config) as (processes, identity),  # a failure creates no folder
        interrupt_flag() as signalled,
        ExitStack() as stack,
    ):
        with processes.agreed():
            state = _steps.begin(model, config, processes)
        with processes.agreed():
            if processes.first:
                _make_folder(run_dir)
                stack.enter_context(held(run_dir))
                remove_staging(run_dir)
        resumed = resume and _steps.go_back(run_dir, state, identity, config)
        with processes.agreed():
            if processes.first:
                if tensorboard:
                    summary_writer()  # fails if it is not installed, while an earlier run is still whole
                if resumed:
                    read_log(run_dir / "log.jsonl")  # fails if it is damaged
                on_start(resumed)
        interrupted = signalled if processes.alone else SignalFlag()
        run = _Run(state, dataset, config, run_dir, identity, dict(metadata or {}), signalled, interrupted)
        run.go(resumed, outdated=outdated, progress=progress, tensorboard=tensorboard, on_line=on_line)
    model.eval()
    p = state.progress
    signal = None if run.is_complete else interrupted.signal
    return TrainResult(p.best_val, p.last_val, p.step, p.seconds, signal)


@dataclass
class _Run:
    """A run in its folder, which is locked.

    `signalled` is set by a signal to this process; `interrupted` is set once all processes know of a signal.
    `processors` is the speed of the processors of all processes together, in operations per second.
    """

    state: TrainState
    dataset: Dataset
    config: TrainConfig
    run_dir: Path
    identity: Mapping[str, object]
    metadata: dict[str, object]
    signalled: SignalFlag
    interrupted: SignalFlag
    started: float = 0.0
    flops_per_token: int = 0
    processors: float = 0.0

    def go(
        self, resumed: bool, *, outdated: Iterable[str], progress: bool, tensorboard: bool, on_line: OnLine
    ) -> None:
        """Train to the end, or to a signal, and write a checkpoint."""
        p, config, first = self.state.progress, self.config, self.state.processes.first
        self.flops_per_token = flops_per_token(self.state.model)
        products = speed_of_products(self.state.device, bf16=config.bf16)
        self.processors = self.state.processes.sum([products])[0]
        begin_peak(self.state.device)  # without the matrices of this measurement, or an earlier run
        self.started = config.now() - p.seconds
        if not resumed:
            self._save_checkpoint()  # so that a run killed early restarts from the same weights
        with self.state.processes.agreed():
            if first and p.best_val is None:
                for name in outdated:
                    (self.run_dir / name).unlink(missing_ok=True)
        evaluated = p.evaluated
        if self.state.processes.from_first(any(not (self.run_dir / name).exists() for name in p.saved)):
            p.best_val, evaluated = None, min(p.evaluated, p.step - 1)  # the model is lost
        with ExitStack() as stack:
            log: RunLog = SilentLog()
            with self.state.processes.agreed():
                if first:
                    after = (p.step, evaluated) if resumed else None
                    file = self.run_dir / "log.jsonl"
                    opened = open_log(file, after=after, tensorboard=tensorboard, on_line=on_line)
                    log = stack.enter_context(opened)
                    log.write("resume" if resumed else "start", p.step, config=asdict(config))
            bar = stack.enter_context(progress_bar(progress and first))
            total, unit = (config.steps, "steps") if config.seconds is None else (config.seconds, "s")
            task = bar.add_task("", total=total, completed=int(self._done), unit=unit, loss="-", speed="-")
            self.state.model.train()
            if first and config.is_over(p.step, p.seconds):
                bar.console.print(f"The run already ended, after step {p.step}.")
            self._evaluate_if_due(log)
            while not config.is_over(p.step, p.seconds) and not self.interrupted.is_set():
                loss = self._step(log)
                speed = f"{p.recent.speed:,.0f} {'tokens' if p.recent.read else 'targets'}/s"
                bar.update(task, completed=self._done, loss=f"{loss:.3f}", speed=speed)
                if p.step % config.log_every == 0:
                    p.recent = checkpoint.Recent()
                self._evaluate_if_due(log)
                if p.step % config.checkpoint_every == 0:
                    self._save_checkpoint()
            self._evaluate_if_due(log)  # if the time ran out after the evaluation of the last step was due
            self._save_checkpoint()
            if self.interrupted.is_set() and first and not self.is_complete:
                bar.console.print(f"Stopped after step {p.step}. Repeat the command to resume.")

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended and was evaluated after its last step; a signal then stops nothing."""
        p = self.state.progress
        return self.config.is_over(p.step, p.seconds) and p.evaluated == p.step

    @property
    def _done(self) -> float:
        p = self.state.progress
        return p.step if self.config.seconds is None else p.seconds

    @property
    def _seconds(self) -> float:
        return self.config.now() - self.started

    def _save_checkpoint(self) -> None:
        self._count_seconds()
        checkpoint.save(self.run_dir, self.state, self.identity, self.metadata)

    def _count_seconds(self) -> None:
        self.state.progress.seconds = self.state.processes.from_first(self._seconds)

    def _tell(self) -> list[float]:
        """Return what is summed over the processes: the time of the first one, and the signals to each."""
        seconds = self._seconds if self.state.processes.first else 0.0
        return [seconds, *(float(self.signalled.signal == number) for number in STOPPING)]

    def _heed(self, sums: Sequence[float]) -> None:
        """Take over the sums of what `_tell` returned on all processes."""
        self.state.progress.seconds, *signals = sums
        for number, count in zip(STOPPING, signals, strict=True):
            if count and not self.interrupted.is_set():
                self.interrupted.signal = number

    def _must_stop(self) -> bool:
        """Return whether a signal has reached any process."""
        if not self.state.processes.alone:
            self._heed(self.state.processes.sum(self._tell()))
        return self.interrupted.is_set()

    def _step(self, log: RunLog) -> float:
        """Make one update and count it; return its loss."""
        p, config = self.state.progress, self.config
        began = time.perf_counter()
        lr = self.state.schedule.lr(p.step, p.seconds)
        done = _steps.update(self.state, self.dataset, config, lr, self._tell)
        p.step += 1
        p.recent.add(done.loss, done.targets, time.perf_counter() - began, done.read)
        if self.state.processes.alone:
            self._count_seconds()
        else:
            self._heed(done.sums)
        if p.step % config.log_every == 0:
            mean, speed = p.recent.mean_loss, p.recent.speed
            flops = p.recent.read * self.flops_per_token
            used = {"mfu": flops / p.recent.seconds / self.processors} if flops else {}
            log.write(
                "train", p.step, loss=mean, lr=lr, grad_norm=done.grad_norm, tokens_per_second=speed, **used
            )
        return done.loss

    def _evaluate_if_due(self, log: RunLog) -> None:
        """Evaluate, update the schedule and the log, and save the weights if they are the best so far."""
        p, config, state = self.state.progress, self.config, self.state
        lost, again = bool(p.saved) and p.best_val is None, p.evaluated == p.step
        regular = p.step % config.eval_every == 0
        if not lost and (again or not (regular or config.is_over(p.step, p.seconds))):
            return
        try:
            p.last_val = evaluate(
                state.evaluated(), self.dataset, config, stop=self._must_stop, processes=state.processes
            )
        except EvaluationStoppedError:
            return  # it is still due when the run resumes
        if not math.isfinite(p.last_val):
            error = FloatingPointError(f"the validation loss after step {p.step} is {p.last_val}: lower lr")
            raise state.processes.fail(error)
        if regular and not again:  # not the final one, which a longer run would not have
            state.schedule.observe(p.last_val)
        if p.best_val is None or p.last_val < p.best_val:
            p.best_val = p.last_val
            best = state.spread.whole(state.evaluated())
            with state.processes.agreed():
                if best is not None:
                    with replacing_files(self.run_dir) as folder:
                        best.save(folder)
                        p.saved = sorted(file.name for file in folder.iterdir())
        p.evaluated = p.step
        peaks = [x for x in state.processes.gather(peak_bytes(state.device)) if x is not None]
        memory = {"peak_bytes": max(peaks)} if peaks else {}  # the largest over the processes
        log.write("eval", p.step, loss=p.last_val, bits=p.last_val / math.log(2), best=p.best_val, **memory)
        self._count_seconds()


def _make_folder(folder: Path) -> None:
    """Create the folder of a run, if it does not exist.

    Raises:
        ValueError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir {folder} cannot be written to: {error.strerror}") from error
