"""`unrolled train --wandb`: what is sent to Weights & Biases, by a stand-in for its library."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import error, everything, works

from unrolled.training import read_log

SMALL = ["data.name=copy", "data.length=8", "model.d_model=8", "model.n_layers=1", "model.n_heads=1"]
SMALL += ["train.eval_every=10", "train.log_every=5", "train.eval_batches=1", "train.schedule=constant"]


class Project:
    """What the library was told: the arguments of `init`, and what was logged at each step."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> "Project":
        self.runs.append(json.loads(json.dumps(options, default=str)))
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=made.init))
    return made


def test_the_log_is_sent_and_a_resumed_run_goes_on(project: Project, tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    train = ["train", *SMALL, f"run_dir={run_dir}", "--wandb", "papers"]
    works(*train, "train.steps=10")
    works(*train, "train.steps=20")
    first, second = project.runs
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["resume"]) == ("papers", "mine", "allow")
    assert first["config"]["train"]["steps"] == 10
    assert project.finished == 2
    lines = [x for x in read_log(run_dir / "log.jsonl") if x["event"] in ("train", "eval")]
    expected = [
        (x["step"], {f"{x['event']}/{name}": y for name, y in x.items() if name not in ("event", "step")})
        for x in lines
    ]
    assert [(step, sorted(x.items())) for step, x in project.lines] == [
        (s, sorted(x.items())) for s, x in expected
    ]
    works(*train, "train.steps=10", "--fresh", "--force")
    assert project.runs[2]["id"] != first["id"]


def test_a_run_that_fails_is_finished(project: Project, tmp_path: Path) -> None:
    words = ["train", *SMALL, f"run_dir={tmp_path / 'run'}", "--wandb", "papers", "train.lr=1e30"]
    assert "lower lr" in error(*words, "train.clip_norm=null", "train.warmup_steps=0")
    assert project.finished == 1


def test_what_the_library_refuses_is_one_sentence_and_the_run_can_begin_later(
    monkeypatch: pytest.MonkeyPatch, project: Project, tmp_path: Path
) -> None:
    class UsageError(Exception):
        pass

    def refuse(dir: Path, **options: Any) -> None:
        (dir / "wandb").mkdir(exist_ok=True)
        raise UsageError("api_key not configured")

    train = ["train", *SMALL, f"run_dir={tmp_path / 'run'}", "train.steps=10", "--wandb", "papers"]
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    assert error(*train) == "--wandb: api_key not configured"
    (tmp_path / "run" / "wandb-id.txt").touch()  # as if the next write had failed
    monkeypatch.setattr(sys.modules["wandb"], "init", project.init)
    works(*train)
    before = everything(tmp_path / "run")
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    assert error(*train, "--fresh", "train.lr=0.1") == "--wandb: api_key not configured"
    assert everything(tmp_path / "run") == before


def test_the_library_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    printed = error("train", *SMALL, f"run_dir={tmp_path / 'run'}", "--wandb", "papers")
    assert "--wandb needs the library wandb, which is missing: run pip install '.[wandb]'" in printed
    assert not (tmp_path / "run").exists()
