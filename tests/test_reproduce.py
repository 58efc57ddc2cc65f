"""`unrolled reproduce` from the first run to the report, interrupted and repeated."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from commands import error, run, works
from experiments.test_definition import TINY
from multi30k_files import write_multi30k
from published import write_babi, write_cifar10_subset, write_imdb, write_mnist
from sounds import write_an4

from unrolled import data, experiments, training
from unrolled.cli import _claims, _experiment_report, _experiments, run_config
from unrolled.decode import load_model
from unrolled.experiments import Results, made_of
from unrolled.ops.processor import multiplies_bf16
from unrolled.training import read_log


def write_all_babi(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write stories of all tasks but the third."""
    story = "1 Mary is in the {}.\n2 Where is Mary?\t{}\t1\n"
    stories = "".join(story.format(room, room) for room in ("hall", "garden") * 20)
    tasks = [task for task in range(1, 21) if task != 3]
    files = {f"qa{task}_x_{part}.txt": stories for task in tasks for part in ("train", "test")}
    return write_babi(root, monkeypatch, files)


WRITTEN = {
    "attention-for-translation": write_multi30k,
    "attention-spectra": write_imdb,
    "bigbird-blocks": write_imdb,
    "cifar-generation": write_cifar10_subset,
    "edited-reviews": write_imdb,
    "lra-text": write_imdb,
    "memory-questions": write_all_babi,
    "mnist-generation": write_mnist,
    "permuted-pixels": write_mnist,
    "speech-ctc": write_an4,
    "video-masks": write_mnist,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY, sort_keys=False))
    return path


def reproduce(path: Path, *words: object) -> str:
    return works("reproduce", path, "--out", path.parent / "out", *words).stdout


def test_an_experiment_is_run_and_reported(tiny: Path) -> None:
    folder = tiny.parent / "out" / "tiny" / "quick"
    printed = reproduce(tiny, "--only", "wide")
    assert "| wide | 0." in printed
    assert 'not known yet: loss["wide"] < loss["narrow"]' in printed
    assert '\nheld: loss["wide", "longer"] < 9' in printed
    assert not (folder / "narrow").exists()
    log = folder / "wide" / "lr=0.1,seed=3" / "log.jsonl"
    before = log.read_bytes()
    printed = reproduce(tiny)
    assert log.read_bytes() == before, "a run that had ended was trained again"
    results = json.loads((folder / "results.json").read_text())
    assert set(results["runs"]) == {f"{x}/lr={lr},seed=3" for x in ("wide", "narrow") for lr in (0.001, 0.1)}
    assert results["scale"] == "quick"
    assert results["machine"]["torch"] == torch.__version__
    losses = {
        x: min(y["loss"] for z, y in results["runs"].items() if z.startswith(x)) for x in ("wide", "narrow")
    }
    held = losses["wide"] < losses["narrow"]
    assert ("held: " if held else "NOT HELD: ") + 'loss["wide"] < loss["narrow"]' in printed
    assert f"{losses['narrow']:.3f}" in (folder / "table.md").read_text()
    assert "| contender | lr 0.001 | lr 0.1 |" in (folder / "table.md").read_text()
    page = (folder / "report.html").read_text()
    assert "Wide is better than narrow." in page
    assert "http" not in page.replace("http-equiv", "")
    assert (folder / "plot.png").exists() == ("data:image/png" in page)
    assert reproduce(tiny, "--table") in printed + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("compared", ["loss", "accuracy"])
def test_tokens_are_evaluated_a_second_time_for_their_accuracy_only(tiny: Path, compared: str) -> None:
    base = TINY["base"] | {"train": TINY["base"]["train"] | {"eval_batches": None}}
    kept = {name: value for name, value in TINY.items() if name not in ("evaluate", "sweep")}
    changed = kept | {"base": base, "expect": [f'{compared}["wide"] < 9']}
    tiny.write_text(yaml.safe_dump(changed, sort_keys=False))
    reproduce(tiny, "--only", "wide")
    folder = tiny.parent / "out" / "tiny" / "quick"
    [figures] = json.loads((folder / "results.json").read_text())["runs"].values()
    ended = run_config.resolve(run_config.read_saved(folder / "wide" / "seed=3"))
    model = load_model(ended.run_dir).eval()
    [score] = training.evaluate_positions(model, ended.dataset, ended.train, [(0, 8)])
    assert figures["loss"] == pytest.approx(score.loss, rel=1e-6)
    assert figures["accuracy"] == (score.accuracy if compared == "accuracy" else None)
    # An expectation that is added later is judged without training again.
    trained = (folder / "wide" / "seed=3" / "log.jsonl").read_bytes()
    tiny.write_text(yaml.safe_dump(changed | {"expect": ['accuracy["wide"] < 9']}, sort_keys=False))
    assert '\nheld: accuracy["wide"] < 9' in reproduce(tiny, "--only", "wide")
    assert (folder / "wide" / "seed=3" / "log.jsonl").read_bytes() == trained


def test_what_the_task_cannot_measure_is_not_expected_for_ever(tiny: Path) -> None:
    kept = {name: value for name, value in TINY.items() if name not in ("evaluate", "sweep")}
    tiny.write_text(yaml.safe_dump(kept | {"expect": ['bleu["wide"] > 1']}, sort_keys=False))
    assert 'not known yet: bleu["wide"] > 1' in reproduce(tiny, "--only", "wide")
    assert 'not measured: bleu["wide"] > 1' in reproduce(tiny)


def test_the_plot_may_be_of_the_further_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    plots = pytest.importorskip("unrolled.bench.plots")
    drawn = []
    monkeypatch.setattr(plots, "points", lambda *arguments: drawn.append(arguments))
    monkeypatch.setattr(plots, "png", lambda figure, metadata: b"")
    experiment = made_of(TINY | {"sweep": {"train.lr": [0.1]}, "horizontal": "evaluate"}, Path("tiny.yaml"))
    runs = {
        Path("wide", f"lr=0.1,seed={seed}"): {"loss": 1.0 + seed, "evaluations": {"longer": {"loss": 4.0}}}
        for seed in experiment.seeds
    }
    _experiment_report.plot(Results(experiment, runs))
    _, title, names, columns = drawn[0]
    assert (title, names) == ("loss", ["narrow", "wide"])
    assert columns == {"as trained": [None, (1.5, 0.5)], "longer": [None, (4.0, 0.0)]}


def test_an_interrupted_experiment_goes_on(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = training.train

    def killed(model, dataset, config, run_dir, **options):  # type: ignore[no-untyped-def]
        if run_dir.name == "lr=0.1,seed=0":
            batch = dataset.batch

            def interrupted(split, *, step, **request):  # type: ignore[no-untyped-def]
                if step == 3:
                    raise KeyboardInterrupt
                return batch(split, step=step, **request)

            monkeypatch.setattr(dataset, "batch", interrupted)
        return train(model, dataset, config, run_dir, **options)

    monkeypatch.setattr(_experiments.training, "train", killed)
    arguments = ["reproduce", tiny, "--out", tiny.parent / "out", "--scale", "full", "--only", "wide"]
    assert run(*arguments).exit_code == 130
    monkeypatch.undo()
    works(*arguments)
    folder = tiny.parent / "out" / "tiny" / "full" / "wide"
    assert sorted(x.name for x in folder.iterdir())[:2] == ["lr=0.001,seed=0", "lr=0.1,seed=0"]
    lines = read_log(folder / "lr=0.1,seed=0" / "log.jsonl")
    assert [x["event"] for x in lines].count("resume") == 1
    model = works("info", folder / "lr=0.1,seed=0").stdout
    assert "decoder" in model


def test_runs_of_another_experiment_are_not_mixed_in(tiny: Path) -> None:
    reproduce(tiny, "--only", "wide")
    tiny.write_text(
        yaml.safe_dump(
            TINY | {"contenders": {"wide": {"model.d_model": 24}}, "expect": ["1 < 2"]}, sort_keys=False
        )
    )
    for words in ([], ["--table"]):
        printed = error("reproduce", tiny, "--out", tiny.parent / "out", *words)
        assert (
            "lr=0.001,seed=3 holds a run with another model.d_model than tiny has now: remove it" in printed
        )


def test_a_swept_value_may_diverge(tiny: Path) -> None:
    tiny.write_text(yaml.safe_dump(TINY | {"sweep": {"train.lr": [0.001, 1e30]}}, sort_keys=False))
    for _ in range(2):
        assert "| wide | 0.001 |" in reproduce(tiny, "--only", "wide")
    text = (tiny.parent / "out" / "tiny" / "quick" / "table.md").read_text()
    assert "diverged" in text


def test_a_contender_that_diverges_does_not_stop_the_others(tiny: Path) -> None:
    contenders = {"wide": {"train.lr": 1e30}, "narrow": {"model.d_model": 8}}
    changes = {"contenders": contenders, "seeds": [3, 4], "scales": {"quick": {}}, "horizontal": "evaluate"}
    kept = {name: value for name, value in TINY.items() if name != "sweep"}
    tiny.write_text(yaml.safe_dump(kept | changes, sort_keys=False))
    for _ in range(2):
        printed = reproduce(tiny)
        assert "| wide | diverged |" in printed
        assert '\nNOT HELD: loss["wide"] < loss["narrow"]\n' in printed
    folder = tiny.parent / "out" / "tiny" / "quick"
    assert {x.relative_to(folder).as_posix() for x in folder.glob("*/*")} == {
        "wide/seed=3", "narrow/seed=3", "narrow/seed=4"
    }  # fmt: skip


def test_a_plot_of_which_nothing_is_left_is_removed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    reproduce(tiny, "--only", "wide")
    plot = tiny.parent / "out" / "tiny" / "quick" / "plot.png"
    assert plot.exists()
    monkeypatch.setattr(_experiment_report, "losses", lambda _: None)
    reproduce(tiny, "--only", "wide")
    assert not plot.exists()


def test_wrong_settings_are_found_before_any_training(tiny: Path) -> None:
    for changes, message in (
        ({"contenders": {"wide": None, "a": {"model.d_modell": 3}}}, "d_modell"),
        ({"evaluate": {"longer": {"data.lenght": 9}}}, "lenght"),
        ({"evaluate": {"deep": {"spectrum": 9}}}, "spectrum of deep is 9, but narrow has 1 layers"),
    ):
        changed = TINY | {"expect": ["1 < 2"]} | changes
        tiny.write_text(yaml.safe_dump(changed, sort_keys=False))
        assert message in error("reproduce", tiny, "--out", tiny.parent / "out")
    assert not (tiny.parent / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.length": 99}, "the model has 8 positions, but must have at least 99"),
        ({"data.n_symbols": 20}, "model.vocab_size is 11, but must be 21"),
        ({"model.d_ff": 99}, "the trained weights do not fit"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_evaluated_is_not_trained(
    tiny: Path, changes: dict[str, object], message: str
) -> None:
    base = TINY["base"] | {"model": TINY["base"]["model"] | {"positions": "learned"}}
    changed = TINY | {"base": base, "evaluate": {"longer": changes}}
    tiny.write_text(yaml.safe_dump(changed, sort_keys=False))
    told = error("reproduce", tiny, "--out", tiny.parent / "out")
    assert "lr=0.001,seed=3 cannot be evaluated as 'longer': " in told
    assert message in told
    assert not (tiny.parent / "out").exists()


def test_a_model_without_attention_weights_is_not_trained_for_its_spectrum(tiny: Path) -> None:
    base = TINY["base"] | {"model": TINY["base"]["model"] | {"positions": "rotary"}}
    changed = TINY | {"base": base, "evaluate": {"longer": {"spectrum": 1}}}
    tiny.write_text(yaml.safe_dump(changed, sort_keys=False))
    told = error("reproduce", tiny, "--out", tiny.parent / "out")
    assert "cannot be evaluated as 'longer': " in told
    assert "linear attention does not compute weights with these options" in told
    assert not (tiny.parent / "out").exists()


def test_a_run_with_other_settings_is_resumed_by_no_option_that_does_not_exist(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_experiments, "_written", stopped)
    arguments = ["reproduce", tiny, "--out", tiny.parent / "out"]
    assert run(*arguments).exit_code == 130
    changed = TINY | {"base": TINY["base"] | {"model": TINY["base"]["model"] | {"n_heads": 2}}}
    tiny.write_text(yaml.safe_dump(changed, sort_keys=False))
    assert "n_heads was 1 and is now 2 (to start over, use --fresh or remove the run folder)" in (
        error(*arguments)
    )


def test_the_report_names_what_the_runs_were_trained_on(tiny: Path) -> None:
    experiment = made_of(TINY, tiny).at("quick")
    runs = {
        trial.folder: {"loss": 0.5, "evaluations": {"longer": {}}, "processor": "A GPU", "device": "cuda"}
        for trial in experiment.sweeps("wide")
    }
    assert "Trained on A GPU." in _experiment_report.page(Results(experiment, runs), "quick", None)


def test_a_run_is_known_by_its_settings_its_data_and_its_evaluations(tiny: Path) -> None:
    reproduce(tiny, "--only", "wide")
    [*_, folder] = sorted((tiny.parent / "out" / "tiny").glob("*/wide/*"))
    saved, figures = folder / "run.yaml", folder / "figures.json"

    settings = yaml.safe_load(saved.read_text())
    del settings["train"]["compile"]  # as an earlier version of the library has left it
    saved.write_text(yaml.safe_dump(settings))
    reproduce(tiny, "--only", "wide")

    settings["train"]["steps"] += 1
    saved.write_text(yaml.safe_dump(settings))
    assert "a run with another train.steps than" in error("reproduce", tiny, "--out", tiny.parent / "out")
    settings["train"]["steps"] -= 1
    saved.write_text(yaml.safe_dump(settings))

    before = figures.read_text()
    for key, name in (("batch", "first batch"), ("evaluate", "evaluate")):
        figures.write_text(json.dumps(json.loads(before) | {key: "another"}))
        assert f"a run with another {name} than" in error("reproduce", tiny, "--out", tiny.parent / "out")

    for damaged in ("", '{"loss": 1}'):
        figures.write_text(damaged)
        assert f"{figures} is damaged: remove it" in error("reproduce", tiny, "--out", tiny.parent / "out")


def test_runs_that_come_with_the_library_are_taken_over(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce(tiny, "--only", "wide", "--scale", "full")
    before = tiny.parent / "out" / "tiny" / "full" / "results.json"
    found = json.loads(before.read_text())
    shutil.rmtree(before.parent)
    monkeypatch.setattr(experiments, "obtained", lambda name: found if name == "tiny" else None)

    assert "| wide | 0." in reproduce(tiny, "--shipped")
    assert not (before.parent / "wide").exists()
    assert (before.parent / "narrow").exists()
    results = json.loads(before.read_text())
    assert {x: y for x, y in results["runs"].items() if x.startswith("wide")} == found["runs"]

    for figures in found["runs"].values():
        figures["settings"]["model"]["d_model"] = 24
    assert "| wide |" not in reproduce(tiny, "--shipped", "--table")


def test_an_experiment_is_copied_and_listed(tmp_path: Path) -> None:
    assert works("reproduce", "mqar", "--copy", tmp_path / "mine.yaml").stdout.startswith("written: ")
    assert (tmp_path / "mine.yaml").read_text() == experiments.path("mqar").read_text()
    (tmp_path / "mine.yaml").write_text("claim: another")
    assert "mine.yaml" in error("reproduce", "mqar", "--copy", tmp_path / "mine.yaml")
    assert "must end in .yaml" in error("reproduce", "mqar", "--copy", tmp_path / "mine.txt")
    printed = works("reproduce", "--out", tmp_path).stdout
    assert all(name in printed for name in experiments.names())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "wide,slim"], "--only has 'slim', but the contenders are narrow, wide"),
        (["--shipped", "--scale", "quick"], "--scale is 'quick', but must be full: the results of --shipped"),
        (["--shipped"], "no results of tiny come with the library: leave out --shipped"),
        (["--scale", "big"], "scale is 'big', but must be one of quick, full, smoke"),
        (["--table"], "no run of tiny has ended in"),
        (["--table", "--only", "wide"], "--only is for training, but --table trains nothing"),
    ],
)
def test_what_cannot_be_done_is_said(tiny: Path, words: list[str], message: str) -> None:
    assert message in error("reproduce", tiny, "--out", tiny.parent / "out", *words)
    assert "--scale is for an experiment" in error("reproduce", "--scale", "quick")


def test_force_is_for_copies(tiny: Path) -> None:
    assert error("reproduce", tiny, "--out", tiny.parent, "--force") == "--force is for --copy"


def test_drawn_data_need_no_folder(tiny: Path) -> None:
    assert "| wide |" in reproduce(tiny, "--scale", "quick", "--only", "wide", "--data-dir", tiny.parent)


@pytest.mark.documents
@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_makes_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = experiments.path(name)
    words: list[object] = ["--scale", "smoke", "--out", tmp_path / "out"]
    if name in WRITTEN:
        WRITTEN[name](tmp_path, monkeypatch)
        words += ["--data-dir", tmp_path]
    values = yaml.safe_load(path.read_text())
    values["base"]["train"]["batch_size"] = 2
    if not multiplies_bf16(torch.device("cpu")):
        values["base"]["train"]["bf16"] = False  # it would take several times as long
    files = values["base"]["data"]
    if files["name"] == "listops":
        files["val_size"] = 20  # drawn in Python, token by token
    if files["name"] == "text":
        for key in {"path", "val_path"} & files.keys():
            files[key] = str(text := tmp_path / f"{key}.txt")
            text.write_text("the quick brown fox jumps over the lazy dog and back again " * 800)
    path = tmp_path / path.name
    path.write_text(yaml.safe_dump(values))
    works("reproduce", path, *words)
    results = json.loads((tmp_path / "out" / name / "smoke" / "results.json").read_text())
    assert len(results["table"]["lines"]) == len(_experiments.load(name).contenders)


@pytest.mark.checkout
def test_the_page_of_claims_is_that_of_the_results() -> None:
    page = Path(__file__).parent.parent / "docs" / "guide" / "claims.md"
    assert page.read_text(encoding="utf-8") == _claims.page(), "run `make format`"


def test_the_page_of_claims_names_what_the_runs_were_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = experiments.obtained("memory-copy")
    assert found is not None
    first, *others = found["runs"].values()
    first |= {"device": "cuda", "processor": "A GPU"}
    for figures in others:
        figures |= {"device": "cpu", "processor": "A CPU"}
    monkeypatch.setattr(experiments, "obtained", lambda name: found if name == "memory-copy" else None)
    assert "\nOn A GPU and one core of A CPU.\n" in _claims.page()


@pytest.mark.parametrize("name", experiments.names())
def test_what_does_not_hold_is_explained(name: str) -> None:
    found = experiments.obtained(name) or {"expectations": []}
    assert all(x["held"] is not False for x in found["expectations"]) or _experiments.load(name).finding


def test_results_with_other_evaluations_are_not_taken_over(tiny: Path) -> None:
    experiment = made_of(TINY, tiny).at("full")
    trial = next(experiment.sweeps("wide"))
    figures = {"settings": run_config.plain(experiment.values(trial)), "evaluations": {"longer": {}}}
    assert _experiments._fits(experiment, trial, figures)
    for changes in ({"evaluate": {"longer": {"data.length": 9}}}, {"evaluations": {"shorter": {}}}):
        assert not _experiments._fits(experiment, trial, figures | changes)


def test_the_accuracy_is_that_of_the_test_split_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = SimpleNamespace(task="answers", vocabulary=data.Vocabulary("ids"))
    ended = SimpleNamespace(train=training.TrainConfig(), dataset=dataset)
    for counts, accuracy in (({"validation": (1, 4), "test": (3, 4)}, 0.75), ({"validation": (1, 4)}, 0.25)):
        monkeypatch.setattr(_experiments, "count_splits", lambda *_, found=counts: found)
        assert _experiments._scores(None, ended, loss=1.0)["accuracy"] == accuracy


def test_losses_are_told_in_bits_and_as_perplexities_where_tasks_have_them() -> None:
    words = data.Vocabulary("tokenizer", tokenizer="{}")
    limited = training.TrainConfig(eval_batches=1)
    for task, vocabulary, measures in (
        ("bits", data.Vocabulary("ids"), {"bits"}),
        ("tokens", data.Vocabulary("ids"), {"bits"}),
        ("tokens", words, {"bits", "perplexity"}),
        ("labels", words, set()),
    ):
        ended = SimpleNamespace(train=limited, dataset=SimpleNamespace(task=task, vocabulary=vocabulary))
        found = _experiments._scores(None, ended, loss=1.0)
        assert {name for name, x in found.items() if x is not None} == {"loss", *measures}


def test_settings_of_the_contenders_to_train_are_checked_and_no_others(tiny: Path) -> None:
    changes = {
        "contenders": {"wide": {"model.attention": "softmax"}, "wrong": {"model.d_modell": 3}},
        "evaluate": {"deep": {"spectrum": 1}},
    }
    tiny.write_text(yaml.safe_dump(TINY | changes | {"expect": ["1 < 2"]}, sort_keys=False))
    assert "| wide |" in reproduce(tiny, "--only", "wide")
    assert "spectral mass" in reproduce(tiny, "--table")


def test_figures_are_those_of_the_best_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = training.train

    def worse_at_last(model, *arguments, **options):  # type: ignore[no-untyped-def]
        result = train(model, *arguments, **options)
        torch.nn.init.zeros_(model.embedding.weight)
        return replace(result, last_val=9.0)

    monkeypatch.setattr(_experiments.training, "train", worse_at_last)
    reproduce(tiny, "--only", "wide")
    folder = tiny.parent / "out" / "tiny" / "quick"
    for place, figures in json.loads((folder / "results.json").read_text())["runs"].items():
        assert figures["loss"] == min(figures["curve"]["loss"])
        settings = run_config.read_saved(folder / place)
        settings["data"]["length"] = 12
        longer = run_config.resolve(settings)
        loss = training.evaluate(load_model(folder / place), longer.dataset, longer.train)
        assert figures["evaluations"]["longer"]["loss"] == loss


def test_the_time_of_a_step_is_that_of_the_steps_that_were_made(tiny: Path) -> None:
    train = {"seconds": 0.2, "eval_every": 2, "eval_batches": 1, "threads": 1}
    kept = {name: value for name, value in TINY.items() if name not in ("sweep", "scales")}
    changed = kept | {"base": TINY["base"] | {"train": train}, "scales": {"quick": {"seeds": [3]}}}
    tiny.write_text(yaml.safe_dump(changed, sort_keys=False))
    reproduce(tiny, "--only", "wide")
    [figures] = json.loads((tiny.parent / "out/tiny/quick/results.json").read_text())["runs"].values()
    assert figures["seconds_per_step"] == figures["seconds"] / figures["steps"]


def test_the_curve_of_a_run_is_that_of_its_losses(tmp_path: Path) -> None:
    lines = [
        {"event": "eval", "step": 2, "loss": 2.0, "best": 2.0},
        {"event": "train", "step": 3, "loss": 9.0},
        {"event": "eval", "step": 4, "loss": 3.0, "best": 2.0},
    ]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert _experiments._curve(tmp_path) == {"step": [2, 4], "loss": [2.0, 3.0]}


@pytest.mark.parametrize(("horizontal", "places"), [("step", [2, 4]), ("seconds", [1.0, 2.0])])
def test_losses_are_drawn_over_steps_or_seconds(
    horizontal: str, places: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plots = pytest.importorskip("unrolled.bench.plots")
    monkeypatch.setattr(plots, "loss_curves", lambda look, title, lines, below: lines)
    experiment = made_of(TINY | {"sweep": {"train.lr": [0.1]}, "horizontal": horizontal}, Path("tiny.yaml"))
    figures = {"loss": 3.0, "seconds_per_step": 0.5, "curve": {"step": [2, 4], "loss": [5.0, 3.0]}}
    runs = {Path("wide", f"lr=0.1,seed={seed}"): figures for seed in experiment.seeds}
    assert _experiment_report.losses(Results(experiment, runs)) == [plots.Line("wide", places, [5.0, 3.0])]


def test_runs_of_the_library_keep_the_processors_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"old/seed=0": {"loss": 1.0}, "new/seed=0": {"loss": 1.0, "processor": "A GPU"}}
    found = {"machine": {"processor": "A CPU"}, "runs": runs}
    monkeypatch.setattr(experiments, "obtained", lambda name: found)
    shipped = _experiments._shipped("tiny")
    assert {place: x["processor"] for place, x in shipped.items()} == {
        "old/seed=0": "A CPU", "new/seed=0": "A GPU"
    }  # fmt: skip


def test_the_files_of_the_data_may_lie_elsewhere_later(tiny: Path) -> None:
    book = tiny.with_name("book.txt")
    book.write_text("to be or not to be " * 100)
    base = TINY["base"] | {"data": {"name": "text", "path": str(book), "length": 8}}
    tiny.write_text(yaml.safe_dump(TINY | {"base": base}, sort_keys=False))
    for place in ("here", "there"):
        assert "| wide |" in reproduce(tiny, "--only", "wide", "--data-dir", tiny.with_name(place))
