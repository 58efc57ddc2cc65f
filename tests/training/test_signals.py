"""SIGTERM and SIGHUP do what Ctrl-C does, in real processes; and no two processes train in one folder."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unrolled.training import read_log

from .standin import Batch, CallsAt, Cycles, StandIn, losses, run, same, weights

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["unrolled.training", "torch._dynamo", "filelock"])

OPTIONS = {"steps": 40, "eval_every": 5, "checkpoint_every": 1000, "log_every": 1, "schedule": "plateau"}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class SlowToEvaluate(Cycles):
    """From an evaluation on, every batch of validation takes as long as a small model with a large split."""

    def __init__(self, mark: Path, after: int) -> None:
        super().__init__(val_sizes=(5, 5, 2) * 60)
        self.mark, self.left = mark, after + 1  # the first call is to tell the data apart

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        self.left -= 1
        for batch in super().eval_batches(batch_size):
            if self.left < 0:
                self.mark.touch()
                time.sleep(0.25)  # 45 seconds in all
            yield batch


def train_slowly(run_dir: Path, ignored: int | None) -> None:
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    result = run(run_dir, data=SlowToEvaluate(run_dir.with_suffix(".mark"), after=2), **OPTIONS)
    result.raise_if_interrupted()


def train_long(run_dir: Path) -> None:
    run(run_dir, **OPTIONS | {"steps": 10**6})


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone")
    run(run_dir, data=Cycles(val_sizes=(5, 5, 2) * 60), **OPTIONS)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_a_long_evaluation_ends_the_run_soon_and_loses_nothing(number, alone, tmp_path):
    run_dir = tmp_path / "run"
    child = processes.Process(target=train_slowly, args=(run_dir, None))
    child.start()
    wait_for(run_dir.with_suffix(".mark").exists)
    began = time.monotonic()
    os.kill(child.pid, number)
    child.join(30)
    assert child.exitcode == 1  # by `Interrupted`, not by the signal itself
    assert time.monotonic() - began < 30
    assert max(step for _, step, _ in losses(run_dir)) == 15
    assert [step for event, step, _ in losses(run_dir) if event == "eval"] == [5, 10]
    result = run(run_dir, data=Cycles(val_sizes=(5, 5, 2) * 60), **OPTIONS)
    assert result.signal is None
    assert same(weights(alone), weights(run_dir))
    assert losses(alone) == losses(run_dir)
    assert (alone / "model.safetensors").read_bytes() == (run_dir / "model.safetensors").read_bytes()


def test_the_result_names_the_signal_and_the_handlers_are_put_back(tmp_path):
    def interrupt() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # once more, as by a parent process
        signal.raise_signal(signal.SIGHUP)

    before = [signal.getsignal(number) for number in SIGNALS]
    result = run(tmp_path, data=CallsAt(5, interrupt))
    assert (result.steps, result.signal) == (6, signal.SIGTERM)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        result.raise_if_interrupted()
    run(tmp_path).raise_if_interrupted()


def test_what_nohup_ignores_stays_ignored(tmp_path):
    child = processes.Process(target=train_slowly, args=(tmp_path / "run", signal.SIGHUP))
    child.start()
    wait_for(tmp_path.joinpath("run.mark").exists)
    os.kill(child.pid, signal.SIGHUP)
    child.join(0.5)
    assert child.is_alive()
    os.kill(child.pid, signal.SIGTERM)
    child.join(30)
    assert child.exitcode == 1


def test_a_second_training_of_a_folder_is_refused_and_the_first_goes_on(tmp_path):
    child = processes.Process(target=train_long, args=(tmp_path,))
    child.start()
    log = tmp_path / "log.jsonl"
    wait_for(lambda: log.exists() and len(read_log(log)) > 3)
    model = StandIn(seed=3)
    for _ in range(10):
        with pytest.raises(ValueError, match="is in use: another process is writing there"):
            run(tmp_path, model=model, resume=False)
    assert model.calls == 0
    logged = len(read_log(log))
    wait_for(lambda: len(read_log(log)) > logged + 20)
    assert child.is_alive()
    child.kill()  # which leaves no lock in the way
    child.join()
    run(tmp_path, resume=False)
