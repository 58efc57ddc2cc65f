"""The scripts in `benchmarks` refuse what they cannot do before any work, and mix no results."""

import json
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unrolled.cli import _bleu, run_config

pytest.importorskip("transformers")  # of linearize
FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
pytestmark = pytest.mark.checkout


def script(name: str) -> SimpleNamespace:
    """Run the definitions of a script."""
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def told(monkeypatch, *words: object) -> None:
    """Set the arguments of the command line."""
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        (
            "deployment",
            ["--tokens", 20],
            "error: --tokens is 20, but must be at least 50, the tokens of a turn",
        ),
        ("linearize", ["liner"], "error: there is no recipe 'liner'; the recipes are linear, softmax,"),
    ],
)
def test_impossible_arguments_are_refused_before_any_work(name, arguments, sentence, monkeypatch, capsys):
    made = script(name)
    told(monkeypatch, *arguments)
    with pytest.raises(SystemExit):
        made.main()
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [([], "runs/linearize"), (["--scale", 0.01], "runs/linearize/scale-0.01"), (["--out", "x"], "x")],
)
def test_a_trial_of_linearize_has_its_own_folder(arguments, folder, monkeypatch):
    main = script("linearize").main
    found = []
    monkeypatch.setitem(main.__globals__, "tell", found.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    told(monkeypatch, "--table", *arguments)
    main()
    assert found == [Path(folder)]


def test_costs_of_linearize_are_those_of_all_models_that_are_there(tmp_path, monkeypatch):
    made = script("linearize")
    costs, loaded = made.costs, []
    monkeypatch.setitem(made.main.__globals__, "load_linearized", loaded.append)
    monkeypatch.setitem(made.main.__globals__, "CONTEXTS", ())
    for name in ("linear", "hybrid"):
        (tmp_path / name).mkdir()
    (tmp_path / "linear" / "model.safetensors").touch()  # the run of the other was interrupted
    costs(None, tmp_path)
    assert loaded == [tmp_path / "linear"]
    rows = [{"recipe": "softmax"}, {"recipe": "linear"}]
    (tmp_path / "costs.json").write_text(json.dumps(rows))
    costs(None, tmp_path)
    assert loaded == [tmp_path / "linear"]
    (tmp_path / "hybrid" / "model.safetensors").touch()
    costs(None, tmp_path)
    assert loaded[1:] == [tmp_path / "linear", tmp_path / "hybrid"]


def test_a_text_that_is_too_short_is_refused_before_training(tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("abc" * 1000)
    measured = script("long_sequence").measured
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    with pytest.raises(SystemExit, match="text has 3,000 tokens, but must have more than 3,000"):
        measured(Namespace(text=str(text), measure=3000, segment=100, bf16=False))


def test_models_are_accelerated_and_run_once_before_they_are_timed(monkeypatch):
    times, events = script("hf_accelerate").times, []

    class Model(torch.nn.Linear):
        kind = "before"

        def generate(self, ids, **options):
            events.append((self.kind, ids.shape[1], options["max_new_tokens"]))

        def forward(self, ids, labels, use_cache):
            assert self.training
            events.append((self.kind, ids.shape[1], "training"))
            return SimpleNamespace(loss=self.weight.sum())

    def accelerate(model):
        events.append("accelerate")
        model.kind = "after"

    def take_turns(runs, **options):
        events.append("clock")
        return {name: [run() or 0.0] for name, run in runs.items()}

    monkeypatch.setitem(times.__globals__, "hf", SimpleNamespace(accelerate=accelerate))
    monkeypatch.setitem(times.__globals__, "take_turns", take_turns)
    times(Model(2, 2).eval(), ["prefill", "decode", "training"], 1)
    jobs = (1024, 1), (16, 64), (1024, "training")
    turn = [(kind, *job) for job in jobs for kind in ("before", "after")]
    assert events == ["accelerate", *turn, "clock", *turn]


@pytest.mark.parametrize(("length", "first", "timed"), [(0, 4096, [4096] * 8), (20_000, 8192, [20_000])])
def test_the_first_update_is_not_timed(length, first, timed, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("abc" * 20_000)
    measured, events = script("long_sequence").measured, []

    def update(model, batch, *rest):
        events.append(batch.inputs.shape[1])
        return 0.0, None

    def clock():
        events.append("clock")
        return len(events)

    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setitem(measured.__globals__, "add_gradient", update)
    monkeypatch.setitem(measured.__globals__, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setitem(measured.__globals__, "keep_freed_memory", lambda: events.append("kept"))
    measured(Namespace(text=str(text), measure=length, segment=4096, bf16=False))
    assert events == ["kept", first, "clock", *timed, "clock"]


def test_a_length_without_sentences_has_no_score(tmp_path, monkeypatch, capsys):
    sides = (["a b c"] * 2, ["d e f"] * 2)
    run = SimpleNamespace(dataset=SimpleNamespace(sentences=lambda name: sides))
    monkeypatch.setattr(run_config, "read_saved", lambda run_dir: None)
    monkeypatch.setattr(run_config, "resolve", lambda config: run)
    monkeypatch.setattr("unrolled.models.load", lambda run_dir: torch.nn.Identity())
    monkeypatch.setattr(_bleu, "translations_of", lambda *arguments: [])
    monkeypatch.setattr(_bleu, "scorer", lambda: lambda found, references: (50.0, None))
    told(monkeypatch, "run", "--out", tmp_path / "x.png")
    script("sentence_length")
    assert "| run | 50.0 | nan | nan | nan | nan | nan |" in capsys.readouterr().out


def test_runs_of_equal_names_have_their_own_losses(tmp_path, monkeypatch, capsys):
    runs = [tmp_path / "a" / "bf16", tmp_path / "b" / "bf16"]
    for loss, run in enumerate(runs, 1):
        run.mkdir(parents=True)
        (run / "log.jsonl").write_text(
            json.dumps({"event": "eval", "step": 5, "loss": loss, "best": loss}) + "\n"
        )
    told(monkeypatch, *runs, "--out", tmp_path / "x.png")
    script("loss_curves")
    assert "| 5 | 1.0000 | 2.0000 |" in capsys.readouterr().out
