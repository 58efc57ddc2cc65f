"""Whatever fails on one process ends all, at once and with one sentence."""

import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from unrolled.training import ElsewhereError
from unrolled.training.processes import ALONE, joined

from .many import on, results
from .standin import CallsAt, Cycles, StandIn, run

SHARDED = {"shard": 2, "schedule": "constant", "steps": 4}


class Breaks(StandIn):
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(inputs, targets) * (math.nan if self.calls == 6 else 1.0)


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """Let no file of this process grow beyond 3,000 bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if full else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def disagree(rank: int) -> None:
    with joined() as processes, processes.agreed():
        if rank == 1:
            raise KeyError("only here")


def stuck_disk(rank: int, full: int, run_dir: Path, **options: Any) -> None:
    with full_disk(rank == full):
        run(run_dir, model=StandIn(width=32), resume=False, **options)


def failing(rank: int, folder: Path) -> dict[str, BaseException | None]:
    """What each of these raises here; the last leaves no connection, so that nothing can follow it."""
    (folder / "file").touch(exist_ok=True)
    run(folder / "sharded", **SHARDED)
    run(folder / "whole", **SHARDED | {"shard": 1})
    if rank == 0:
        for name in ("part", "document"):
            shutil.copytree(folder / "sharded", folder / name)
        damage(next((folder / "part" / "last").rglob("shard-00002*")))
        (folder / "document" / "last.json").write_text("{")
        shutil.copytree(folder / "whole", folder / "damaged")
        damage(folder / "damaged" / "last.safetensors")
    dist.barrier()

    def missing() -> None:
        raise ValueError("shard 7 is missing")

    cases: dict[str, Callable[[], object]] = {
        "an indivisible batch": lambda: run(folder / "a", batch_size=5),
        "an indivisible shard": lambda: run(folder / "b", shard=3),
        "another model on 1": lambda: run(folder / "c", model=StandIn(width=8 if rank else 16)),
        "other data on 1": lambda: run(folder / "d", data=Cycles(noise=0.5 if rank else 0.1)),
        "no folder": lambda: run(folder / "file" / "run"),
        "another checkpoint": lambda: run(folder / "whole", model=StandIn(width=8), **SHARDED),
        "another sharded checkpoint": lambda: run(folder / "sharded", model=StandIn(width=8), **SHARDED),
        "a damaged file": lambda: run(folder / "damaged", **SHARDED),
        "a damaged part": lambda: run(folder / "part", **SHARDED),
        "a damaged document": lambda: run(folder / "document", **SHARDED),
        "fewer steps": lambda: run(folder / "sharded", **SHARDED | {"steps": 3}),
        "no finite loss": lambda: run(folder / "e", model=Breaks()),
        "a full disk on 0": lambda: stuck_disk(rank, 0, folder / "f"),
        "a full disk on 0, sharded": lambda: stuck_disk(rank, 0, folder / "g", shard=2),
        "a full disk on 1, sharded": lambda: stuck_disk(rank, 1, folder / "sharded", **SHARDED | {"seed": 1}),
        "an error of one": lambda: disagree(rank),
        "a batch missing on 1": lambda: run(folder / "h", data=CallsAt(3, missing) if rank else None),
    }
    found: dict[str, BaseException | None] = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = None
        except Exception as error:
            found[name] = type(error)(*error.args)  # without its traceback, which cannot be sent
    return found


SAID = {
    "an indivisible batch": (
        0,
        ValueError,
        "batch_size is 5, but must be a multiple of 2, the number of proc",
    ),
    "an indivisible shard": (
        0,
        ValueError,
        "shard is 3, but must divide the number of processes, which is 2",
    ),
    "another model on 1": (1, ValueError, "model.width is 16 on process 0 and 8 on process 1"),
    "other data on 1": (
        1,
        ValueError,
        "the processes of a run must be given the same, but data.first_batch is",
    ),
    "no folder": (0, ValueError, "cannot be written to: Not a directory"),
    "another checkpoint": (
        0,
        ValueError,
        "last.safetensors cannot be resumed: model.width was 16 and is now 8",
    ),
    "another sharded checkpoint": (
        0,
        ValueError,
        "last.json cannot be resumed: model.width was 16 and is now 8",
    ),
    "a damaged file": (0, ValueError, "last.safetensors was changed after it was saved: its SHA-256 differs"),
    "a damaged part": (
        1,
        ValueError,
        "-00001.safetensors was changed after it was saved: its SHA-256 differs",
    ),
    "a damaged document": (0, ValueError, "last.json cannot be read"),
    "fewer steps": (0, ValueError, "steps is 3, but"),
    "no finite loss": (0, FloatingPointError, "the loss of step 6 is nan"),
    "a full disk on 0": (0, OSError, "File too large"),
    "a full disk on 0, sharded": (0, OSError, "File too large"),
    "a full disk on 1, sharded": (1, OSError, "File too large"),
    "an error of one": (1, KeyError, "only here"),
    "a batch missing on 1": (1, ValueError, "shard 7 is missing"),
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, BaseException | None]]]:
    folder = tmp_path_factory.mktemp("failed")
    return folder, results(2, failing, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_one_process_says_why_and_the_other_ends(name, failed):
    culprit, kind, sentence = SAID[name]
    raised = failed[1][culprit][name]
    assert type(raised) is kind
    assert sentence in str(raised)
    assert "\n" not in str(raised)
    other = failed[1][1 - culprit][name]
    assert type(other) is ElsewhereError
    if name != "a batch missing on 1":
        assert sentence in str(other) or sentence in str(raised.args)


@pytest.mark.slow
def test_what_was_there_is_left_as_it_was(failed):
    folder = failed[0]
    assert not (folder / "a").exists()
    assert json.loads((folder / "sharded" / "last.json").read_text())["progress"]["step"] == 4
    assert run(folder / "sharded", schedule="constant", steps=6).steps == 6  # by one process
    assert not [x for x in folder.rglob("*") if "staging" in x.name]


def die(rank: int, run_dir: Path) -> None:
    run(run_dir, data=CallsAt(5, lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank else None, shard=2)


def test_a_killed_process_ends_the_others(tmp_path):
    survivor, killed = on(2, die, tmp_path)
    assert killed is None
    assert type(survivor) is ElsewhereError
    assert "another process of the run has ended" in str(survivor)


def test_one_process_asks_nobody():
    assert ALONE.gather(3) == [3]
    assert ALONE.sum([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.from_first("x") == "x"
    with pytest.raises(KeyError), ALONE.agreed():
        raise KeyError
    with pytest.raises(ValueError, match="shard is 2, but must divide the number of processes, which is 1"):
        run(Path("unused"), shard=2)
