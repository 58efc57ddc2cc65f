"""Comparisons of what was measured, against Python's own evaluation of them."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unrolled.experiments.expressions import Expectation

NAMES = ("linear", "lsh-4")
VALUES = {("loss", "linear", None): 1.5, ("loss", "lsh-4", None): 2.25, ("loss", "lsh-4", "at 9"): -0.5}


def known(*place):
    """The value of one seed."""
    return [VALUES[place]]


class Loss:
    """What `loss` is to Python."""

    def __getitem__(self, place):
        contender, at = place if isinstance(place, tuple) else (place, None)
        return VALUES["loss", contender, at]


leaves = st.one_of(
    st.integers(0, 9).map(str),
    st.sampled_from(["0.25", 'loss["linear"]', 'loss["lsh-4"]', 'loss["lsh-4", "at 9"]']),
)
sides = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        inner.map(lambda x: f"-{x}"),
        inner.map(lambda x: f"abs({x})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda x: f"{x[0]}({x[1]}, {x[2]})"),
    ),
    max_leaves=6,
)


@given(left=sides, relation=st.sampled_from(["<", "<=", ">", ">="]), right=sides)
def test_an_expectation_is_what_python_makes_of_it(left, relation, right):
    text = f"{left} {relation} {right}"
    found = Expectation.parse(text, NAMES, ["at 9"])
    verdict = found.judge(known)
    names = {"loss": Loss(), "abs": abs, "min": min, "max": max}
    assert verdict.text == text
    assert verdict.held == eval(text, names)
    assert verdict.sides == (eval(left, names), eval(right, names))


def test_spaces_around_an_expectation_mean_nothing():
    assert Expectation.parse(' loss["a"] < 2 ', ["a"]).judge(lambda *_: [1.0]).held


def test_what_is_not_measured_yet_is_not_judged():
    found = Expectation.parse('loss["linear"] / 2 < 1', NAMES)
    assert found.judge(lambda *place: None)[1:] == (None, None, None)
    assert found.judge(lambda *place: [1.0])[1:] == (True, (0.5, 1.0), None)


def test_a_mean_is_that_over_all_contenders():
    found = Expectation.parse("abs(mean(loss) - 2) < 1", NAMES)
    assert found.text == "abs(mean(loss) - 2) < 1"
    assert found.judge(known)[1:3] == (True, (0.125, 1.0))
    some = {("loss", "linear", None): [1.5]}
    assert found.judge(lambda *place: some.get(place))[1:3] == (None, None)


def test_the_measures_of_an_expectation():
    text = 'max(loss["linear"], 2) < mean(accuracy) + iou["lsh-4", "at 9"]'
    assert Expectation.parse(text, NAMES, ["at 9"]).measures == {"loss", "accuracy", "iou"}


def test_a_quotient_by_zero_holds_for_nothing():
    for text in ('1 / loss["linear"] > 0', '1 / loss["linear"] <= 0'):
        verdict = Expectation.parse(text, NAMES).judge(lambda *place: [0.0, 0.0])
        assert verdict.held is False
        assert math.isnan(verdict.sides[0])
        assert verdict.error is None
        assert not verdict.close


@pytest.mark.parametrize(
    ("text", "differences"),
    [
        ('loss["a"] < loss["b"]', [-1, -1, -4]),
        ('loss["a"] - loss["b"] > 7', [-8, -8, -11]),
        ('max(loss["a"], loss["b"]) < 1', [1, 2, 5]),
        ("mean(loss) < 3", [-1.5, -0.5, 1]),
        ('abs(loss["a"]) <= 2', [-1, 0, 0]),
    ],
)
def test_the_standard_error_is_that_of_the_differences_of_each_seed(text, differences):
    seeds = {"a": [1, 2, 2], "b": [2, 3, 6]}
    verdict = Expectation.parse(text, seeds).judge(lambda measure, contender, evaluation: seeds[contender])
    assert verdict.error == pytest.approx(statistics.stdev(differences) / math.sqrt(3))
    assert verdict.close == (abs(verdict.sides[0] - verdict.sides[1]) < verdict.error)


def test_a_single_seed_or_other_numbers_of_seeds_have_no_standard_error():
    found = Expectation.parse('loss["linear"] < loss["lsh-4"]', NAMES)
    assert found.judge(lambda *place: [1.0]).error is None
    uneven = {"linear": [1.0, 2.0], "lsh-4": [3.0]}
    assert found.judge(lambda measure, contender, evaluation: uneven[contender])[1:] == (
        True,
        (1.5, 3.0),
        None,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss[", "is not a comparison"),
        ('loss["linear"]', "must compare two sides with <, <=, > or >="),
        ("1 < 2 < 3", "must compare two sides"),
        ("1 == 1", "must compare two sides"),
        ('loss["linear"] < True', "has 'True', but must be made of numbers"),
        ('loss["linear", "at 7"] < 1', "has the evaluation 'at 7', but there are: at 9"),
        ("loss[linear] < 1", None),
        ('speed["linear"] < 1', "but must be made of numbers.* and loss, accuracy"),
        ("__import__('os').getpid() < 1", "but must be made of numbers"),
        ("(lambda: 1)() < 1", "but must be made of numbers"),
        ("'a' < 'b'", "but must be made of numbers"),
        ("abs() < 1", "but must be made of numbers"),
        ("abs(1, 2) < 1", "but must be made of numbers"),
        ("min(1) < 1", "but must be made of numbers"),
        ('loss["linear", "at 9", "x"] < 1', "but must be made of numbers"),
        ("2 ** 9 < 1", "but must be made of numbers"),
        ("mean(speed) < 1", "has .*speed.*, but must be made of numbers.* mean of a measure"),
        ("mean(1) < 1", "but must be made of numbers"),
    ],
)
def test_anything_else_is_refused(text, message):
    if message is None:  # without quotes it is the name all the same
        assert Expectation.parse(text, NAMES).judge(known)[1:3] == (False, (1.5, 1.0))
        return
    with pytest.raises(ValueError, match=message):
        Expectation.parse(text, NAMES, ["at 9"])
