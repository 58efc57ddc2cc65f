"""What runs add up to, against the library statistics."""

import json
import math
import statistics

import pytest

from unrolled.experiments import Mean, Results
from unrolled.experiments.results import shown_as

from .test_definition import tiny


def figures(loss: float, **more) -> dict:
    return {
        "loss": loss,
        "accuracy": None,
        "seconds": 2.0,
        "evaluations": {"longer": {"loss": 2 * loss}},
    } | more


def test_the_best_swept_value_goes_on_with_the_other_seeds():
    experiment = tiny(seeds=[0, 1, 2])
    runs = {}
    results = Results(experiment, runs)
    first, second = experiment.sweeps("wide")
    assert results.best("wide") is None
    assert results.trials("wide") == [first, second]
    runs[first.folder], runs[second.folder] = figures(0.9), figures(0.7)
    assert results.best("wide") == second
    trials = results.trials("wide")
    assert [str(x.folder) for x in trials] == [
        "wide/lr=0.001,seed=0", "wide/lr=0.1,seed=0", "wide/lr=0.1,seed=1", "wide/lr=0.1,seed=2"
    ]  # fmt: skip
    for trial, loss in zip(trials[2:], (0.8, 0.6), strict=True):
        runs[trial.folder] = figures(loss)
    mean, error = results.mean("loss", "wide")
    assert mean == pytest.approx(0.7)
    assert error == pytest.approx(statistics.stdev([0.7, 0.8, 0.6]) / math.sqrt(3))
    assert results.mean("loss", "wide", "longer").mean == pytest.approx(1.4)
    assert results.mean("accuracy", "wide") is None


def test_of_restarts_the_best_counts():
    experiment = tiny(sweep={"train.seed": [0, 1, 2]}, seeds=None, expect=["mean(loss) < 0.6"])
    runs = {}
    results = Results(experiment, runs)
    for name, losses in {"wide": (0.9, 0.5, 0.7), "narrow": (0.6, 0.8, 0.9)}.items():
        for trial, loss in zip(results.trials(name), losses, strict=True):
            assert experiment.values(trial)["train"]["seed"] == trial.swept["train.seed"]
            runs[trial.folder] = figures(loss)
    assert sorted(map(str, runs))[3:] == ["wide/seed=0", "wide/seed=1", "wide/seed=2"]
    assert results.mean("loss", "wide") == (0.5, None)
    assert [(x.held, x.sides) for x in results.verdicts()] == [(True, (0.55, 0.6))]


def test_expectations_wait_for_every_run_that_they_need():
    runs = {}
    experiment = tiny()
    results = Results(experiment, runs)
    assert [x.held for x in results.verdicts()] == [None, None]
    for trial in experiment.sweeps("wide"):
        runs[trial.folder] = figures(0.5)
    assert [x.held for x in results.verdicts()] == [None, None], "the second seed is missing"
    runs[results.seeds("wide")[1].folder] = figures(0.5)
    assert [x.held for x in results.verdicts()] == [None, True]
    for phase in (experiment.sweeps, results.seeds):
        for trial in phase("narrow"):
            runs[trial.folder] = figures(0.4)
    assert [(x.held, x.sides) for x in results.verdicts()] == [(False, (0.5, 0.4)), (True, (1.0, 9.0))]


def test_a_run_that_diverged_is_not_the_best():
    runs = {}
    results = Results(tiny(), runs)
    first, second = tiny().sweeps("wide")
    runs[first.folder], runs[second.folder] = {"loss": None, "evaluations": {"longer": {}}}, figures(0.7)
    assert results.best("wide").swept == {"train.lr": 0.1}
    assert results.tried()[1] == [["wide", "diverged", "0.700"]]


def test_a_contender_that_diverged_is_no_better_than_any_other():
    runs = {}
    expect = ['loss["narrow"] < loss["wide"]', 'loss["narrow"] < 9', 'max(9, loss["wide"]) > loss["narrow"]']
    results = Results(tiny(seeds=[0, 1], expect=expect), runs)
    none = {"loss": None, "evaluations": {"longer": {}}}
    for trial in results.trials("wide"):
        runs[trial.folder] = none
    assert results.trials("wide") == list(tiny().sweeps("wide")), "no other seed is needed"
    assert results.table() == (["contender", "train.lr", "loss", "seeds"], [["wide", "", "diverged", "1"]])
    for _ in range(2):
        for trial in results.trials("narrow"):
            runs[trial.folder] = figures(0.5)
    assert results.table()[1][0][:3] == ["narrow", "0.001", "0.500 ± 0.000"]
    assert [(x.held, x.sides) for x in results.verdicts()] == [(False, None), (True, (0.5, 9)), (False, None)]
    runs[results.seeds("narrow")[1].folder] = none
    assert results.table()[1][0][:3] == ["narrow", "0.001", "diverged"]
    assert [x.held for x in results.verdicts()] == [False] * 3


def test_a_quotient_by_zero_is_no_number_in_json():
    runs = {}
    results = Results(tiny(seeds=[0], expect=['loss["wide"] / (loss["wide"] - loss["wide"]) > 2']), runs)
    for trial in tiny().sweeps("wide"):
        runs[trial.folder] = figures(0.5)
    [told] = results.to_json()["expectations"]
    assert (told["held"], told["sides"]) == (False, (None, 2.0))
    json.dumps(results.to_json(), allow_nan=False)


def test_times_of_two_processors_are_not_compared():
    runs = {}
    experiment = tiny(
        seeds=[0], expect=['seconds["wide"] < seconds["narrow"]', 'loss["wide"] < loss["narrow"]']
    )
    results = Results(experiment, runs)
    for name, processor in (("wide", "A"), ("narrow", "B")):
        for trial in experiment.sweeps(name):
            runs[trial.folder] = figures(0.5, processor=processor)
    assert [x.held for x in results.verdicts()] == [None, False]
    for x in runs.values():
        x["processor"] = "A"
    assert [x.held for x in results.verdicts()] == [False, False]


def test_times_of_two_processors_have_no_mean():
    runs = {}
    results = Results(tiny(sweep=None, expect=None), runs)
    [first] = results.experiment.sweeps("wide")
    runs[first.folder] = figures(0.5, processor="A")
    for trial, processor in zip(results.seeds("wide"), "AB", strict=True):
        runs[trial.folder] = figures(0.5, processor=processor)
    assert results.mean("seconds", "wide") is None
    assert results.mean("loss", "wide") == (0.5, 0)
    for x in runs.values():
        x["processor"] = "A"
    assert results.mean("seconds", "wide") == (2, 0)


def test_the_best_values_at_an_edge_of_the_sweep_are_named():
    runs = {}
    sweep = {"train.lr": [0.1, 0.001, 0.01], "train.optimizer": ["adamw", "muon"]}
    results = Results(tiny(seeds=[0], sweep=sweep, expect=None), runs)
    assert results.edges() == []
    best = {"wide": 0.1, "narrow": 0.01}
    for name, lr in best.items():
        for trial in results.experiment.sweeps(name):
            runs[trial.folder] = figures(1 + abs(trial.swept["train.lr"] - lr))
    assert results.edges() == ["The best train.lr is the largest one tried for wide."]
    assert results.to_json()["edges"] == results.edges()


def test_the_table_and_the_file_say_what_was_measured():
    runs = {}
    experiment = tiny(published={"wide": "0.1"}, seeds=[0])
    results = Results(experiment, runs)
    for trial in experiment.sweeps("wide"):
        runs[trial.folder] = figures(0.25, accuracy=0.875, parameters=1234, seconds_per_step=0.5)
    header, lines = results.table()
    assert header == [
        "contender", "published", "train.lr", "loss", "accuracy", "seconds", "seconds per step", "parameters", "seeds",
    ]  # fmt: skip
    assert lines == [["wide", "0.1", "0.001", "0.250", "87.5%", "2", "0.5", "1,234", "1"]]
    assert results.evaluated() == (["contender", "evaluation", "loss"], [["wide", "longer", "0.500"]])
    assert results.tried() == (["contender", "lr 0.001", "lr 0.1"], [["wide", "0.250", "0.250"]])
    found = json.loads(json.dumps(results.to_json()))
    assert found["runs"]["wide/lr=0.1,seed=0"]["loss"] == 0.25
    assert found["runs"]["wide/lr=0.1,seed=0"]["settings"]["train"]["lr"] == 0.1
    assert found["table"]["lines"] == lines
    assert found["evaluated"]["lines"] == [["wide", "longer", "0.500"]]


@pytest.mark.parametrize(
    ("measure", "mean", "error", "text"),
    [
        ("loss", 0.12345, 0.0067, "0.123 ± 0.007"),
        ("accuracy", 0.9871, 0.0123, "98.7% ± 1.2%"),
        ("error_rate", 0.0871, 0.0123, "8.7% ± 1.2%"),
        ("iou", 0.5, None, "50.0%"),
        ("bits", 1.2346, None, "1.235"),
        ("perplexity", 12.34, 0.56, "12.3 ± 0.6"),
        ("seconds", 1234.6, 7.8, "1,235 ± 8"),
        ("seconds_per_step", 0.012345, None, "0.0123"),
        ("parameters", 1234567.0, 0.0, "1,234,567"),
    ],
)
def test_each_measure_is_written_in_its_own_form(measure, mean, error, text):
    assert shown_as(measure, Mean(mean, error)) == text


def test_bleu_stands_beside_that_of_longer_sentences():
    runs = {}
    experiment = tiny(seeds=[0])
    results = Results(experiment, runs)
    for trial in experiment.sweeps("wide"):
        runs[trial.folder] = figures(0.5, bleu=33.46, evaluations={"longer": {"loss": 1.0, "bleu": 21.04}})
    header, [line] = results.table()
    assert dict(zip(header, line, strict=True)) == {
        "contender": "wide", "train.lr": "0.001", "loss": "0.500", "bleu": "33.5", "seconds": "2", "seeds": "1",
    }  # fmt: skip
    assert results.evaluated() == (
        ["contender", "evaluation", "loss", "bleu"], [["wide", "longer", "1.000", "21.0"]],
    )  # fmt: skip


def test_a_measure_of_further_evaluations_only():
    runs = {}
    experiment = tiny(
        seeds=[0],
        evaluate={"layer 1": {"spectrum": 1}},
        expect=['spectral_mass["wide", "layer 1"] > 0.9'],
    )
    results = Results(experiment, runs)
    for trial in experiment.sweeps("wide"):
        runs[trial.folder] = figures(0.5, evaluations={"layer 1": {"spectral_mass": 0.95}})
    assert results.evaluated() == (
        ["contender", "evaluation", "spectral mass"], [["wide", "layer 1", "0.950"]],
    )  # fmt: skip
    assert [x.held for x in results.verdicts()] == [True]


def test_the_table_counts_the_seeds_that_have_ended():
    experiment, runs = tiny(sweep=None, seeds=[0, 1, 2]), {}
    results = Results(experiment, runs)
    runs[next(experiment.sweeps("wide")).folder] = figures(0.5)
    for count, trial in enumerate(results.seeds("wide"), 1):
        runs[trial.folder] = figures(0.5)
        assert results.table()[1][0][-1] == str(count)


def test_a_measure_that_one_seed_lacks_has_no_mean():
    experiment, runs = tiny(sweep=None, seeds=[0, 1]), {}
    results = Results(experiment, runs)
    for trial, more in zip(results.experiment.sweeps("wide"), ({"accuracy": 0.5},), strict=True):
        runs[trial.folder] = figures(0.5, **more)
    assert results.mean("accuracy", "wide") == (0.5, None)
    runs[results.seeds("wide")[1].folder] = figures(0.7)
    assert results.mean("accuracy", "wide") is None


def test_times_of_steps_on_two_processors_are_not_compared():
    expect = ['seconds_per_step["wide"] < 9', 'seconds_per_step["wide"] < seconds["narrow"]']
    experiment = tiny(seeds=[0], expect=expect)
    runs = {
        trial.folder: figures(0.5, processor=processor, seconds_per_step=0.1)
        for name, processor in (("wide", "A"), ("narrow", "B"))
        for trial in experiment.sweeps(name)
    }
    assert [x.held for x in Results(experiment, runs).verdicts()] == [True, None]


def test_a_single_value_is_at_no_edge():
    experiment = tiny(sweep={"train.lr": [0.1]})
    results = Results(experiment, {x.folder: figures(0.5) for x in experiment.sweeps("wide")})
    assert results.best("wide").swept == {"train.lr": 0.1}
    assert results.edges() == []
