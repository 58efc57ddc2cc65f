"""SIGKILL at any moment: nothing is corrupted, and the resumed run ends bit for bit as one left alone."""

import multiprocessing
import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest

from unrolled.training import read_log

from .standin import losses, run, same, weights

# A server that has imported once what an optimiser step imports, and forks: a process costs milliseconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["unrolled.training", "torch._dynamo", "filelock"])

LONG = {"steps": 60, "checkpoint_every": 4, "eval_every": 7, "log_every": 1, "schedule": "plateau"}
SHORT = {"steps": 4, "checkpoint_every": 3, "eval_every": 2, "log_every": 1, "optimizer": "radam"}


def train_in_child(run_dir: Path) -> None:
    run(run_dir, **LONG)


def die_at_call(run_dir: Path, fatal: int) -> None:
    """Train, and be killed at the n-th sync or rename; a file about to be synced is left half-written."""
    calls = 0
    fsync, replace = os.fsync, os.replace

    def count() -> bool:
        nonlocal calls
        calls += 1
        return calls == fatal

    def fatal_fsync(descriptor: int) -> None:
        if count():
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    def fatal_replace(source: Path, target: Path) -> None:
        if count():
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.fsync, os.replace = fatal_fsync, fatal_replace
    run(run_dir, **SHORT)


def leftovers(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.iterdir() if path.name.startswith(".unrolled")]


def steps_logged(run_dir: Path) -> int:
    return max((line["step"] for line in read_log(run_dir / "log.jsonl")), default=0)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    run(tmp_path / "alone", **LONG)
    cut = tmp_path / "cut"
    rng = random.Random(0)
    for kill in range(6):
        child = processes.Process(target=train_in_child, args=(cut,))
        child.start()
        step = 8 * kill + rng.randrange(1, 9)
        while child.is_alive() and steps_logged(cut) < step:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.01))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL  # not finished, nor failed by itself
        weights(cut)  # whole at every moment
    run(cut, **LONG)
    assert same(weights(tmp_path / "alone"), weights(cut))
    assert losses(tmp_path / "alone") == losses(cut)
    assert leftovers(cut) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run(run_dir, **SHORT)
    return run_dir


@pytest.mark.parametrize("fatal", range(1, 23))
def test_killed_at_every_sync_and_rename(tmp_path, undisturbed, fatal):
    child = processes.Process(target=die_at_call, args=(tmp_path, fatal))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    run(tmp_path, **SHORT)
    assert same(weights(undisturbed), weights(tmp_path))
    assert losses(undisturbed) == losses(tmp_path)
    assert (undisturbed / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert leftovers(tmp_path) == []
