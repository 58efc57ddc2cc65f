"""`unrolled train --dry-run` as a user meets it."""

import re
from pathlib import Path

import pytest
from commands import error, works
from multi30k_files import write_multi30k

SMALL = ["train.batch_size=4", "train.steps=300"]
COPY = ["data.name=copy", "data.length=8", "model.d_model=16", "model.n_layers=1", *SMALL]
TASKS = {
    "copy": ("data.length=8", "model.d_model=16"),
    "copy_bits": ("model.hidden_size=16",),
    "adding": ("data.length=8", "model.hidden_size=16"),
    "multi30k": ("data.vocab_size=300", "model.d_model=16"),
}


def run(*arguments: object) -> str:
    return works(*arguments).stdout


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_prints_memory_and_time_and_writes_nothing(tmp_path: Path) -> None:
    printed = run("train", "--dry-run", *COPY, "run_dir=runs/x")
    lines = dict(line.rstrip().split(maxsplit=1) for line in printed.splitlines())
    assert list(lines) == [
        "model",
        "memory",
        "activations",
        "peak",
        "steps",
        "MFU",
        "evaluations",
        "time",
        "folder",
    ]
    parameters = int(re.fullmatch(r"decoder, ([\d,]+) parameters", lines["model"])[1].replace(",", ""))
    sizes = re.findall(r"([\d.]+) kB (\w+)", lines["memory"])
    assert [name for _, name in sizes] == ["weights", "gradients", "optimiser"]
    weights, gradients, optimizer = (float(x) for x, _ in sizes)
    assert re.fullmatch(r"[\d.]+ kB at most, gradients of weights not counted", lines["activations"])
    assert weights == gradients == pytest.approx(parameters * 4 / 1000, rel=5e-3)
    assert optimizer == pytest.approx(2 * weights, rel=2e-2)
    assert lines["steps"].startswith("300 of 4 examples, ")
    assert lines["evaluations"].startswith("2 of ")
    assert lines["folder"] == "runs/x, where nothing was written"
    assert list(tmp_path.iterdir()) == []


def test_states_of_segments_and_carried_ones_are_told() -> None:
    text = ["data.name=text", "data.length=40", "data.order=consecutive", "model.d_model=16", *SMALL]
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog and back again " * 40)
    options = ["data.path=text.txt", "train.segment=10", "train.carry_state=true", "run_dir=runs/x"]
    printed = run("train", "--dry-run", *text, *options)
    assert re.search(r"optimiser\s+\+\s+[\d.]+\s+kB\s+states", printed)
    assert re.search(r"segments +[\d.]+ kB of states between them, in a temporary file", printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_it_works_for_every_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNROLLED_DATA", str(tmp_path))
    if name == "multi30k":
        write_multi30k(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    printed = run("train", "--dry-run", f"data.name={name}", *TASKS[name], *SMALL, "run_dir=runs/x")
    assert "tokens/s" in printed or "targets/s" in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_gone_on_from_or_begun_afresh() -> None:
    settings = [*COPY, "train.schedule=constant", "run_dir=runs/x"]
    run("train", *settings, "train.steps=20")
    assert re.search(r"steps +280 to go, 20 done, of 4 examples", run("train", "--dry-run", *settings))
    assert re.search(r"steps +300 of 4 examples", run("train", "--dry-run", "--fresh", *settings))
    done = run("train", "--dry-run", *settings, "train.steps=20")
    assert re.search(r"steps +20, all done", done)
    assert "peak" not in done


@pytest.mark.parametrize(
    "wrong",
    [
        ["model.attention=nothing"],
        ["train.steps=0"],
        ["train.setps=5"],
        ["data.length=x"],
        ["train.lr=1e30", "train.warmup_steps=0"],
        ["run_dir=full"],
        ["--device", "nowhere"],
        ["model.d_model=4000000"],
    ],
)
def test_what_train_refuses_is_refused_in_the_same_words(wrong: list[str], tmp_path: Path) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    settings = ["train", *COPY, "run_dir=runs/x", *wrong]
    refused = error(*settings, "--dry-run")
    assert not Path("runs").exists()
    assert error(*settings) == refused
