"""The files of experiments: what they mean, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from unrolled import experiments
from unrolled.cli import _experiments, run_config
from unrolled.experiments import SMOKE, Experiment, Results, made_of

TINY: dict[str, Any] = {
    "claim": "Wide is better than narrow.",
    "paper": "Nobody 1900",
    "base": {
        "data": {"name": "copy", "length": 8},
        "model": {"d_model": 8, "n_layers": 1, "n_heads": 1, "positions": "rotary", "recipe": "classic"},
        "train": {"steps": 4, "eval_every": 2, "eval_batches": 1, "threads": 1},
    },
    "contenders": {"narrow": None, "wide": {"model.d_model": 16}},
    "sweep": {"train.lr": [0.001, 0.1]},
    "seeds": [0, 1],
    "evaluate": {"longer": {"data.length": 12}},
    "scales": {"quick": {"train.steps": 2, "seeds": [3]}, "full": None},
    "expect": ['loss["wide"] < loss["narrow"]', 'loss["wide", "longer"] < 9'],
    "budget": {"quick": 1, "full": 2},
}

IN_FILES = ("text", "babi", "imdb", "mnist", "cifar10", "an4", "multi30k")


def tiny(**changes: Any) -> Experiment:
    return made_of({x: y for x, y in (TINY | changes).items() if y is not None}, Path("tiny.yaml"))


@pytest.mark.parametrize("name", experiments.names())
def test_the_experiments_of_the_library_can_be_run(name, monkeypatch):
    loaded, load = {}, run_config.data.load

    def once(**options):  # contenders share their data, which take seconds to make
        key = repr(options)
        if key not in loaded:
            loaded[key] = load(**options)
        return loaded[key]

    monkeypatch.setattr(run_config.data, "load", once)
    experiment = _experiments.load(name)
    assert experiment.claim.endswith(".")
    assert set(experiment.published) <= set(experiment.contenders)
    assert list(experiment.scales) == ["quick", "full"] == list(experiment.budget)
    for scale in experiment.scales:
        at = experiment.at(scale)
        for contender in at.contenders:
            for trial in at.sweeps(contender):
                values = at.values(trial)
                if "name" in values["model"] or values["data"]["name"] in IN_FILES:
                    continue  # other kinds of models, and data in files
                run_config.resolve(values)


def test_a_scale_leaves_contenders_different():
    contenders = {"narrow": {"model.d_model": 8}, "wide": {"model.d_model": 16}}
    with pytest.raises(ValueError, match=r"narrow and wide in contenders of .* same at the scale quick"):
        tiny(contenders=contenders, scales={"quick": {"model.d_model": 32}, "full": None})


def test_a_scale_changes_all_contenders_and_a_contender_the_base():
    quick = tiny(contenders={"a": {"train.steps": 9, "model.n_heads": 2}}, expect=None).at("quick")
    [trial, other] = quick.sweeps("a")
    assert str(trial.folder) == "a/lr=0.001,seed=3"
    assert other.swept == {"train.lr": 0.1}
    values = quick.values(trial)
    assert values["train"] == {
        "steps": 2, "eval_every": 2, "eval_batches": 1, "threads": 1, "lr": 0.001, "seed": 3
    }  # fmt: skip
    assert values["model"]["n_heads"] == 2
    assert TINY["base"]["model"]["n_heads"] == 1


def test_the_smoke_scale_makes_two_steps_with_one_seed_and_one_value():
    smoke = tiny().at(SMOKE)
    [trial] = smoke.sweeps("wide")
    assert smoke.seeds == (0,)
    assert smoke.values(trial)["train"]["steps"] == 2


def test_the_smoke_scale_does_not_train_for_a_time():
    base = TINY["base"] | {"train": TINY["base"]["train"] | {"seconds": 60.0}}
    smoke = tiny(base=base).at(SMOKE)
    assert smoke.values(next(smoke.sweeps("wide")))["train"]["seconds"] is None


def test_a_contender_may_have_a_section_of_its_own():
    experiment = tiny(
        contenders={"lstm": {"model": {"name": "recurrent_lm"}, "train.clip_norm": 0.5}}, expect=None
    )
    values = experiment.values(next(experiment.sweeps("lstm")))
    assert values["model"] == {"name": "recurrent_lm"}


def test_a_scale_changes_sections_of_a_contender_too():
    experiment = tiny(contenders={"own": {"train": {"steps": 9000}}}, expect=None)
    for scale, steps in ((SMOKE, 2), ("quick", 2), ("full", 9000)):
        at = experiment.at(scale)
        assert at.values(next(at.sweeps("own")))["train"]["steps"] == steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claims": "x"}, "tiny.yaml has the key 'claims', but must have some of base, budget, claim"),
        ({"paper": None}, "tiny.yaml has no paper, but must have base, budget, claim, contenders, paper"),
        ({"contenders": {}}, "contenders of tiny.yaml is {}, but must be a mapping that is not empty"),
        ({"seeds": 3}, "seeds of tiny.yaml is 3, but must be a list that is not empty"),
        ({"seeds": [0, 0]}, r"seeds of tiny.yaml is \[0, 0\], but must not have a seed twice"),
        ({"seeds": [True]}, r"seeds of tiny.yaml is \[True\], but must be a list of whole numbers"),
        ({"scales": {"full": {"seeds": 3}}}, "seeds of full in scales of tiny.yaml is 3, but must be a list"),
        ({"sweep": {"train.lr": 0.1}}, "train.lr in sweep of tiny.yaml is 0.1, but must be a list of values"),
        ({"sweep": {"model.attention": "linear"}}, "is 'linear', but must be a list of values"),
        ({"sweep": {"lr": [0.1]}}, "sweep of tiny.yaml has 'lr', but must have settings like train.lr"),
        (
            {"scales": {"full": {"sweep": {"train.lr": []}}}},
            r"train.lr in sweep of full in scales of tiny.yaml is \[\], but must be a list of values",
        ),
        ({"contenders": {16: None}}, "the name 16 in contenders of tiny.yaml is not text: put it in quotes"),
        ({"evaluate": {1024: {}}}, "the name 1024 in evaluate of tiny.yaml is not text"),
        ({"base": {"model": "decoder"}}, "model in base of tiny.yaml is 'decoder', but must be a mapping"),
        (
            {"contenders": {"a, b": {}}},
            "the name 'a, b' in contenders of tiny.yaml has a comma, which separates names in --only",
        ),
        (
            {"contenders": {"..": {}}},
            "the name '..' in contenders of tiny.yaml is that of a folder, but begins with a dot or has",
        ),
        (
            {"contenders": {"a/b": {}}},
            "the name 'a/b' in contenders of tiny.yaml is that of a folder, but begins with a dot or has",
        ),
        ({"published": {"sofmax": "2.1"}}, "published of tiny.yaml names 'sofmax', which is no contender"),
        (
            {"base": {"train": {"seed": 7}}},
            "base of tiny.yaml sets train.seed, but must not: `seeds` or `sweep` sets it",
        ),
        (
            {"base": {"train": {"lr": 0.5}}, "sweep": {"train.lr": [0.1]}},
            "base of tiny.yaml sets train.lr, but must not",
        ),
        (
            {"scales": {"full": {"train.lr": 0.5, "sweep": {"train.lr": [0.1]}}}},
            "full in scales of tiny.yaml sets train.lr, but must not",
        ),
        (
            {"contenders": {"a": {"train.seed": 7}}},
            "a in contenders of tiny.yaml sets train.seed, but must not: `seeds` or `sweep` sets it",
        ),
        ({"contenders": {"a": {"train": {"lr": 7}}}}, "a in contenders of tiny.yaml sets train.lr, but must"),
        (
            {"sweep": {"train.seed": [1, 2]}},
            r"seeds of tiny is \[0, 1\], but must be a single one where train.seed is swept",
        ),
        ({"horizontal": "time"}, "horizontal of tiny.yaml is 'time', but must be 'step', 'seconds' or 'eval"),
        (
            {"horizontal": "evaluate", "evaluate": None, "expect": None},
            "horizontal of tiny.yaml is 'evaluate', but must not be without further evaluations",
        ),
        ({"contenders": {"a": {"d_model": 3}}}, "a in contenders of tiny.yaml sets 'd_model', but must set"),
        (
            {"contenders": {"a": {"model": "linear"}}},
            "model of a in contenders of tiny.yaml is 'linear', but must be a mapping",
        ),
        ({"contenders": {"a": {"model": None}}}, "model of a in contenders of tiny.yaml is None"),
        ({"contenders": {"a": 3}}, "a in contenders of tiny.yaml is 3, but must be a mapping of settings"),
        ({"scales": {"full": {"model": {}}}}, "full in scales of tiny.yaml sets 'model', but must set parts"),
        ({"expect": []}, r"expect of tiny.yaml is \[\], but must be a list that is not empty, or left out"),
        ({"expect": ["1 < 2", "1 < 2"]}, "expect of tiny.yaml has '1 < 2' twice"),
        ({"budget": {"full": "x"}}, "full in budget of tiny.yaml is 'x', but must be a number of minutes"),
        ({"budget": {"full": -1}}, "full in budget of tiny.yaml is -1, but must be a number of minutes"),
        (
            {"sweep": {"train.lr": [0.1, 0.1]}},
            "train.lr in sweep of tiny.yaml is .*, but must not have a value",
        ),
        ({"evaluate": {"same": {}}}, "same in evaluate of tiny.yaml is empty, but must change a setting"),
        ({"contenders": {"a": {}, "A": {}}}, "'a' and 'A' in contenders of tiny.yaml differ in case only"),
        (
            {"evaluate": {"x": {"train.lr": 1}}},
            "x in evaluate of tiny.yaml sets 'train.lr', but must set parts of data and model, .* or spectrum",
        ),
        (
            {"evaluate": {"x": {"spectrum": 0}}},
            "spectrum of x in evaluate of tiny.yaml is 0, but must be a whole number of at least 1",
        ),
        (
            {"expect": ["loss['none'] < 1"]},
            "tiny.yaml: the expectation .* has the contender 'none', but there",
        ),
        (
            {"expect": ["loss[['wide']] < 1"]},
            r"tiny.yaml: the expectation .* has the contender \['wide'\], but there",
        ),
        (
            {"expect": ["loss[{[1]: 2}] < 1"]},
            r"tiny.yaml: the expectation .* has the contender .*1.*, but there",
        ),
        (
            {"scales": {"full": {"sweep": {"model.d_model": [8]}}}},
            "wide in contenders of tiny.yaml sets model.d_model, but must not",
        ),
        ({"published": {True: "1", "none": "2"}}, "published of tiny.yaml names True, which is no contender"),
        (
            {"contenders": {"": {"model.attention": "linear"}}},
            "the name '' in contenders of tiny.yaml is that of a folder, but is empty",
        ),
        (
            {"scales": {"../up": {"train.steps": 3}}},
            r"the name '../up' in scales of tiny.yaml is that of a folder, but begins with a dot or has a slash",
        ),
        (
            {"scales": {"smoke": {"train.steps": 3}}},
            "scales of tiny.yaml has 'smoke', but must not: that scale is two steps of every run",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_keys_of_two_types_are_refused_too():
    with pytest.raises(ValueError, match=r"tiny\.yaml has the key 1, but must have some of"):
        made_of({1: "a", "foo": "b"}, Path("tiny.yaml"))


def test_an_unknown_scale_or_experiment_is_refused():
    with pytest.raises(ValueError, match="scale is 'big', but must be one of quick, full, smoke"):
        tiny().at("big")
    with pytest.raises(
        ValueError, match=r"the experiment is 'none', but must be a \.yaml file or one of attent"
    ):
        _experiments.load("none")
    with pytest.raises(ValueError, match=r"none\.yaml does not exist"):
        _experiments.load("none.yaml")


@pytest.mark.parametrize("name", [name for name in experiments.names() if experiments.obtained(name)])
def test_the_results_of_the_library_are_those_of_its_experiments(name):
    """So that no figure outlives the settings that it was made with."""
    found, experiment = experiments.obtained(name), _experiments.load(name).at("full")
    assert found is not None
    assert found["scale"] == "full"
    assert [x["text"] for x in found["expectations"]] == list(experiment.expect)
    results = Results(experiment, {Path(folder): run for folder, run in found["runs"].items()})
    assert [(x.text, x.held) for x in results.verdicts()] == [
        (x["text"], x["held"]) for x in found["expectations"]
    ]
    trials = {x.folder.as_posix(): x for name in experiment.contenders for x in results.trials(name)}
    for folder, run in found["runs"].items():
        assert run["settings"] == experiment.values(trials[folder])


def test_a_swept_value_with_a_path_stays_inside_of_the_folder():
    paths = ["book.txt", "./book.txt", "../book.txt", "x" * 300]
    folders = [trial.folder for trial in tiny(sweep={"data.path": paths}).sweeps("a")]
    assert len(set(folders)) == len(paths)
    assert all(folder.parent == Path("a") and len(folder.name) < 80 for folder in folders)
