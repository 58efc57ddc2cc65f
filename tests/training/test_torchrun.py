"""Commands under torchrun: killed processes, signals, wrong settings."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import run as command

from unrolled.training import read_log

from .many import results
from .standin import same, weights

SETTINGS = ["data.name=text", "data.length=16", "model.d_model=16", "model.n_layers=1", "model.n_heads=2"]
SETTINGS += ["model.dropout=0.1", "train.batch_size=4", "train.schedule=constant", "train.threads=1"]
SETTINGS += ["train.checkpoint_every=5", "train.log_every=1", "train.eval_every=1000", "train.eval_batches=1"]


def settings(folder: Path, run_dir: Path, **changes: Any) -> list[str]:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog and back again " * 40)
    return [
        *SETTINGS,
        f"data.path={text}",
        f"run_dir={run_dir}",
        *(f"train.{k}={x}" for k, x in changes.items()),
    ]


@contextmanager
def torchrun(*words: str, restarts: int = 0) -> Iterator["subprocess.Popen[str]"]:
    """Start `unrolled train` on two processes; all of them are gone at the end."""
    begin = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    begin += ["--rdzv-endpoint", "localhost:0", f"--max-restarts={restarts}", "--monitor-interval", "0.1"]
    with running(*begin, "-m", "unrolled", "train", *words) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                for pid in ranks(started).values():
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def running(*module: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a module of Python, which has ended at the end."""
    started = subprocess.Popen(
        [sys.executable, "-m", *module],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=30)


def ranks(started: "subprocess.Popen[str]") -> dict[int, int]:
    """The processes that torchrun has started, by their rank."""
    found = {}
    for pid in Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        named = dict(x.split(b"=", 1) for x in variables if b"=" in x)
        if b"RANK" in named:
            found[int(named[b"RANK"])] = int(pid)
    return found


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events(run_dir: Path, event: str) -> list[int]:
    return [x["step"] for x in read_log(run_dir / "log.jsonl") if x["event"] == event]


def train(rank: int, words: list[str]) -> int:
    return command("train", *words).exit_code


def untouched(folder: Path, steps: int) -> Path:
    """Train as the command does, on two processes that nothing disturbs."""
    run_dir = folder / f"untouched-{steps}"
    assert results(2, train, settings(folder, run_dir, steps=steps)) == [0, 0]
    return run_dir


def whole_log(run_dir: Path, steps: int) -> None:
    assert events(run_dir, "train") == [*range(1, steps + 1)]
    assert events(run_dir, "start") == [0]
    assert not [x for x in run_dir.rglob("*") if "staging" in x.name or x.suffix == ".tmp"]


@pytest.mark.scale
def test_a_killed_process_restarts_all_and_sigterm_ends_them_with_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    with torchrun(*settings(tmp_path, run_dir, steps=10**6), restarts=3) as started:
        wait_for(lambda: events(run_dir, "train")[7:])
        os.kill(ranks(started)[1], signal.SIGKILL)
        wait_for(lambda: events(run_dir, "resume"))
        resumed = events(run_dir, "resume")[-1]
        wait_for(lambda: events(run_dir, "train")[-1:] > [resumed + 2])
        began = time.monotonic()
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=60)
        assert time.monotonic() - began < 30
    assert said.count("interrupted by SIGTERM") == 1
    assert resumed % 5 == 0
    steps = events(run_dir, "train")[-1]
    whole_log(run_dir, steps)
    assert same(weights(untouched(tmp_path, steps)), weights(run_dir))


@pytest.mark.scale
@pytest.mark.parametrize(("kills", "shard"), [(10, 1), (4, 2)])  # steps on shards take several times as long
def test_kills_leave_no_trace_in_the_weights(tmp_path, kills, shard):
    """Under the agent of torchrun, which forks the processes, so that each starts again at once."""
    run_dir, steps, rng = tmp_path / "run", 7 * kills + 5, random.Random(0)
    words = settings(tmp_path, run_dir, steps=steps, shard=shard)
    with running("training.elastic", str(tmp_path), "30", *words) as started:
        for kill in range(kills):
            wait_for(lambda: (events(run_dir, "train") or [0])[-1] >= 7 * kill + 5)  # noqa: B023
            time.sleep(rng.random() / 20)
            os.kill(int((tmp_path / str(rng.randrange(2))).read_text()), signal.SIGKILL)
            wait_for(lambda: len(events(run_dir, "resume")) > kill or started.poll() is not None)  # noqa: B023
        assert started.wait(90) == 0
    whole_log(run_dir, steps)
    if shard == 2:  # resumed where it ended, the file of one process has all weights
        assert command("train", *settings(tmp_path, run_dir, steps=steps, shard=1)).exit_code == 0
        alike = weights(run_dir)
        sharded = tmp_path / "sharded"
        assert results(2, train, settings(tmp_path, sharded, steps=steps, shard=2)) == [0, 0]
        assert command("train", *settings(tmp_path, sharded, steps=steps, shard=1)).exit_code == 0
        assert same(weights(sharded), alike)
    else:
        assert same(weights(untouched(tmp_path, steps)), weights(run_dir))


@pytest.mark.scale
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_other_signals_to_torchrun_stop_all_too(tmp_path, number):
    run_dir = tmp_path / "run"
    with torchrun(*settings(tmp_path, run_dir, steps=10**6)) as started:
        wait_for(lambda: events(run_dir, "train")[7:])
        started.send_signal(number)
        _, said = started.communicate(timeout=60)
    assert said.count("interrupted") == 1
    steps = events(run_dir, "train")[-1]
    assert same(weights(untouched(tmp_path, steps)), weights(run_dir))


@pytest.mark.scale
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 5}, "batch_size is 5, but must be a multiple of 2"),
        ({"shard": 3}, "shard is 3, but must divide the number of processes"),
        ({"steps": -1}, "steps is -1, but must be"),
    ],
)
def test_wrong_settings_are_one_sentence_and_exit_code_2(tmp_path, changes, sentence):
    with torchrun(*settings(tmp_path, tmp_path / "run", **changes)) as started:
        _, said = started.communicate(timeout=60)
    assert said.count("error: ") == 1
    assert sentence in said
    codes = re.findall(r"exitcode +: (-?\d+)", said)
    assert "2" in codes
    assert set(codes) <= {"2", "-15"}  # torchrun ends what still runs once it has seen one fail
    assert not (tmp_path / "run").exists()
