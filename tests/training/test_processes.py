"""Training on 2 and 4 processes is training on one: the same losses, checkpoints, figures, files and errors."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from unrolled.training import evaluate, read_log
from unrolled.training.averaging import tensors_of
from unrolled.training.processes import joined
from unrolled.training.spread import whole

from .many import results
from .standin import CallsAt, Cycles, StandIn, config, losses, run

STEPS = {"steps": 10, "log_every": 1, "eval_every": 5, "schedule": "constant"}
RESUMED = STEPS | {"steps": 16}
LOSS, WEIGHT = 5e-6, 1e-5


class Recording(StandIn):
    """Keeps the rows that it is trained on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"dropout": 0.0} | options)
        self.seen: list[list[int]] = []

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.cat([inputs, targets], dim=1).tolist()
        return super().loss(inputs, targets)


def trained(rank: int, run_dir: Path, options: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any], Any]:
    """Train in a folder: the rows, the weights and the result, on each process."""
    model = Recording(dropout=options.pop("dropout", 0.0))
    result = run(run_dir, model=model, data=options.pop("data", None), **options)
    return model.seen, {n: whole(x.detach()).numpy() for n, x in tensors_of(model).items()}, result


def several(rank: int, runs: list[tuple[Path, dict[str, Any]]]) -> list[Any]:
    return [trained(rank, run_dir, dict(options)) for run_dir, options in runs]


def far(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[n] - b[n]).max()) for n in a)


def apart(a: Path, b: Path) -> float:
    """The largest difference of two logs in a loss."""
    mine, other = losses(a), losses(b)
    assert [x[:2] for x in mine] == [x[:2] for x in other]
    return max(abs(x[2] - y[2]) for x, y in zip(mine, other, strict=True))


def rows_of(found: list[Any]) -> list[list[int]]:
    return sorted(row for seen, _, _ in found for row in seen)


def leftovers(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.rglob("*") if "staging" in path.name or path.suffix == ".tmp"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Train on one process, each setting once."""
    folder, done = tmp_path_factory.mktemp("alone"), {}

    def once(**options: Any) -> tuple[Path, Any]:
        key = json.dumps(options, sort_keys=True)
        if key not in done:
            run_dir = folder / str(len(done))
            done[key] = run_dir, trained(0, run_dir, dict(options))
        return done[key]

    return once


MANY = {
    "copies": {},
    "shards": {"shard": 2},
    "rows of each micro-batch": {"accumulate": 3},
    "sharded, rows of each micro-batch": {"accumulate": 3, "shard": 2},
    "averages": {"ema": 0.9, "shard": 2},
    "recomputed": {"gradient_checkpointing": True, "shard": 2},
    "radam": {"optimizer": "radam", "shard": 2, "clip_norm": None},
    "plateau": {"schedule": "plateau", "eval_every": 1, "lr": 0.05, "shard": 2},
}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("two")
    found = results(2, several, [(folder / name, STEPS | x) for name, x in MANY.items()])
    return folder, {name: [rank[i] for rank in found] for i, name in enumerate(MANY)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_two_processes_are_one(name, on_two, alone):
    folder, found = on_two
    one, (seen, weights, result) = alone(**STEPS | {x: y for x, y in MANY[name].items() if x != "shard"})
    assert rows_of(found[name]) == sorted(seen)
    assert apart(one, folder / name) < LOSS
    for _, other, ended in found[name]:
        assert far(weights, other) < WEIGHT
        assert abs(ended.best_val - result.best_val) < LOSS
    lines = [[(x["event"], x["step"]) for x in read_log(path / "log.jsonl")] for path in (one, folder / name)]
    assert lines[0] == lines[1]
    assert leftovers(folder / name) == []
    assert {p.name for p in (folder / name).glob("last*")} == (
        {"last", "last.json"} if "shard" in MANY[name] else {"last.safetensors"}
    )
    best = [load_file(path / "model.safetensors") for path in (one, folder / name)]
    assert far(*({n: x.numpy() for n, x in weights.items()} for weights in best)) < WEIGHT


def more_on_two(rank: int, folder: Path, two: Path) -> dict[str, Any]:
    """All else that is asked of two processes, in one launch."""
    found: dict[str, Any] = {}
    found["whole"] = trained(rank, folder / "whole", STEPS | {"accumulate": 2})
    for name, saved, shard in (
        ("to shards", "copies", 2),
        ("to copies", "shards", 1),
        ("again", "shards", 2),
    ):
        if rank == 0:
            shutil.copytree(two / saved, folder / name)
        dist.barrier()
        found[name] = trained(rank, folder / name, RESUMED | {"shard": shard})
    seeds: list[int] = []
    run(folder / "seeds", model=Draws(seeds), **STEPS)
    found["seeds"] = seeds
    with joined() as processes:
        data = Cycles(val_sizes=(5, 3, 2, 4, 1))
        found["evaluated"] = evaluate(StandIn(), data, config(), processes=processes)
    interrupt = CallsAt(5, lambda: signal.raise_signal(signal.SIGTERM))
    interrupted = run(folder / "signal", data=interrupt if rank == 1 else None, **STEPS | {"shard": 2})
    found["signal"] = interrupted.steps, interrupted.signal
    return found


class Draws(StandIn):
    """Tells which seed each training batch has."""

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        self.seeds = seeds

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.seeds.append(torch.initial_seed())
        return super().loss(inputs, targets)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory, on_two: Any) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("more")
    return folder, results(2, more_on_two, folder, on_two[0])


@pytest.mark.slow
def test_whole_micro_batches_give_the_bits_of_one_process(more, alone):
    folder, found = more
    one, (seen, weights, _) = alone(**STEPS | {"accumulate": 2})
    assert apart(one, folder / "whole") < LOSS
    assert rows_of([x["whole"] for x in found]) == sorted(seen)
    for x in found:
        assert far(weights, x["whole"][1]) == 0  # `calls`, which counts forward passes, included


@pytest.mark.slow
@pytest.mark.parametrize("name", ["to shards", "to copies", "again"])
def test_what_two_processes_saved_is_resumed_on_two(name, more, alone):
    folder, found = more
    resumed_as_one(folder / name, [x[name] for x in found], alone)


def resumed_as_one(run_dir: Path, found: list[Any], alone: Any) -> None:
    one, (seen, weights, _) = alone(**RESUMED)
    per_step = len(seen) // 16
    assert rows_of(found) == sorted(seen[10 * per_step :])
    assert apart(one, run_dir) < LOSS
    for _, other, _ in found:
        assert far(weights, other) < WEIGHT
    events = [x["event"] for x in read_log(run_dir / "log.jsonl")]
    assert events.count("start") == events.count("resume") == 1
    assert leftovers(run_dir) == []


def test_what_two_processes_saved_is_resumed_on_one(on_two, alone, tmp_path):
    shutil.copytree(on_two[0] / "shards", tmp_path / "run")
    resumed_as_one(tmp_path / "run", [trained(0, tmp_path / "run", dict(RESUMED))], alone)
    assert {p.name for p in (tmp_path / "run").glob("last*")} == {"last.safetensors"}


def test_each_process_and_update_has_its_own_dropout(more):
    seeds = [seed for x in more[1] for seed in x["seeds"]]
    assert len(seeds) == len(set(seeds)) == 20


def test_an_evaluation_is_that_of_one_process_in_every_bit(more):
    expected = evaluate(StandIn(), Cycles(val_sizes=(5, 3, 2, 4, 1)), config())
    assert [x["evaluated"] for x in more[1]] == [expected, expected]


def test_a_signal_to_one_process_stops_both_at_one_step(more):
    folder, found = more
    assert [x["signal"] for x in found] == [(6, signal.SIGTERM)] * 2
    document = json.loads((folder / "signal" / "last.json").read_text())
    assert document["progress"]["step"] == 6


def on_four(rank: int, folder: Path, two: Path) -> dict[str, Any]:
    found = {"2 x 2": trained(rank, folder / "2 x 2", STEPS | {"shard": 2, "accumulate": 3})}
    found["4 copies"] = trained(rank, folder / "4 copies", dict(STEPS))
    if rank == 0:
        shutil.copytree(two / "shards", folder / "resumed")
    dist.barrier()
    found["resumed"] = trained(rank, folder / "resumed", RESUMED | {"shard": 4})
    return found


@pytest.mark.scale
def test_four_processes_are_one(on_two, alone, tmp_path):
    found = results(4, on_four, tmp_path, on_two[0])
    for name, options in (("2 x 2", {"accumulate": 3}), ("4 copies", {})):
        one, (seen, weights, _) = alone(**STEPS | options)
        assert rows_of([x[name] for x in found]) == sorted(seen)
        assert apart(one, tmp_path / name) < LOSS
        assert max(far(weights, x[name][1]) for x in found) < WEIGHT
    resumed_as_one(tmp_path / "resumed", [x["resumed"] for x in found], alone)


def test_of_two_checkpoints_the_later_one_counts(on_two, tmp_path):
    """As after a crash between the writing of one and the removal of the other."""
    shutil.copytree(on_two[0] / "shards", tmp_path / "run")
    shutil.copy(on_two[0] / "copies" / "last.safetensors", tmp_path / "run")
    for later, earlier in (("last.json", "last.safetensors"), ("last.safetensors", "last.json")):
        shutil.copytree(tmp_path / "run", tmp_path / later)
        (tmp_path / later / later).touch()
        os.utime(tmp_path / later / earlier, (0, 0))
        content = bytearray((tmp_path / later / earlier).read_bytes())
        content[len(content) // 2] ^= 255  # which would be noticed
        (tmp_path / later / earlier).write_bytes(content)
        os.utime(tmp_path / later / earlier, (0, 0))
        assert trained(0, tmp_path / later, dict(RESUMED))[2].steps == 16
        assert not (tmp_path / later / "last.json").exists()
