"""A wrong contender is refused, a missing one is reported, and measurements have the right units."""

import dataclasses
import math
import mmap
from functools import partial

import pytest
import torch
from commands import run

from unrolled.bench import case, cases, machine, memory, runner
from unrolled.bench.case import Contender, Definition, MissingError, NotMeasuredError, Problem, Settings
from unrolled.bench.machine import Limits
from unrolled.bench.report import Report
from unrolled.contract import UnsupportedError

LIMITS = Limits(flops=1e9, flops_missing="", copying=2e9, reading=1e9)
X = torch.arange(1.0, 101.0)


def raising(error):
    def prepare():
        raise error

    return prepare


def doubling(factor=2.0, add=0.0):
    return lambda: lambda: [X * factor + add]


def problem(*contenders, **options):
    definition = Definition(lambda: [2 * X.double()], ["y"], 1e-6, flops=100, nbytes=800)
    return Problem([Contender(*x, "double", **o) for *x, o in contenders], {"double": definition}, **options)


def rows(*contenders, **options):
    before = torch.get_num_threads()
    found = runner.run_problem(problem(*contenders, **options), Settings(seconds=0.0), LIMITS)
    assert torch.get_num_threads() == before
    return {row.contender: row for row in found}


def test_a_correct_contender_is_timed_relative_to_the_limits():
    row = rows(("a", doubling(), {"ours": True}), steps=4, tokens=10)["a"]
    assert (row.status, row.runs, row.threads) == ("ok", runner.LEAST, 1)
    assert row.least <= row.median <= row.most
    assert row.flops == 100 / row.median
    assert row.share_of_flops == row.flops / 1e9
    assert row.share_of_copying == row.bandwidth / 2e9 == 800 / row.median / 2e9
    assert row.tokens_per_second == 10 / row.median
    assert row.error < 1e-7
    assert 0 < row.working <= 1


def test_times_are_those_of_one_of_the_jobs_of_a_run(monkeypatch):
    monkeypatch.setattr(runner, "take_turns", lambda runs, **_: {name: [8.0, 40.0, 12.0] for name in runs})
    row = rows(("a", doubling(), {}), steps=4, tokens=6)["a"]
    assert (row.least, row.median, row.most, row.best_peer) == (2.0, 3.0, 10.0, 3.0)
    assert (row.tokens_per_second, row.flops, row.bandwidth) == (2.0, 100 / 3, 800 / 3)


@pytest.mark.parametrize("quick", [True, False])
def test_contenders_share_the_seconds_of_the_settings_and_a_quick_run_is_one(quick, monkeypatch):
    given, two = {}, problem(("a", doubling(), {}), ("b", doubling(), {}))
    take_turns = runner.take_turns

    def noted(runs, **options):
        given.update(options)
        return take_turns(runs, **options | {"budget": 0})

    monkeypatch.setattr(runner, "take_turns", noted)
    found = runner.run_problem(two, Settings(seconds=7.0, quick=quick), LIMITS)
    assert given["budget"] == 7.0
    assert [row.runs for row in found] == [1 if quick else 3] * 2


def test_what_must_be_exact_is_right_if_it_is():
    exact = Definition(lambda: [2 * X.double()], ["y"], 0.0)
    contenders = [Contender(name, doubling(add=x), "f") for name, x in (("same", 0), ("near", 1e-5))]
    same, near = runner.run_problem(Problem(contenders, {"f": exact}), Settings(seconds=0.0), LIMITS)
    assert (same.status, same.error, near.status) == ("ok", 0.0, "wrong")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (doubling(2.002), "max error 0.001 in y, where at most 1e-06 is rounding"),
        (doubling(math.nan), "max error inf in y (NaN)"),
        (lambda: lambda: [X[:3]], "max error inf in y (of shape [3], not [100])"),
    ],
)
def test_a_wrong_contender_is_not_timed(prepare, words):
    found = rows(("right", doubling(), {}), ("wrong", prepare, {}))
    assert found["wrong"].status == "wrong"
    assert words in found["wrong"].reason
    assert found["wrong"].median is None
    assert found["wrong"].runs == 0
    assert found["right"].median > 0


def test_one_wrong_number_among_gradients_is_enough():
    exact = [X.double(), torch.ones(50).double()]
    definition = Definition(lambda: exact, ["o", "dq"], 1e-6)
    spoiled = torch.ones(50)
    spoiled[-1] += 1e-3
    error, name = runner.largest_error([X, spoiled], definition)
    assert error == pytest.approx(1e-3, rel=1e-3)
    assert name == "dq"


def test_the_size_of_a_result_that_is_zero_but_for_rounding_is_that_of_the_largest():
    exact = [X.double(), torch.full((5,), 1e-16).double(), torch.zeros(5).double()]
    definition = Definition(lambda: exact, ["o", "dq", "dk"], 1e-6)
    error, name = runner.largest_error([X, torch.full((5,), 1e-5), torch.full((5,), -2e-5)], definition)
    assert (error, name) == (pytest.approx(2e-7), "dk")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModuleNotFoundError("No module named 'peer'", name="peer"), "missing"),
        (ImportError("cannot import name 'f' from 'peer'", name="peer"), "missing"),
        (ModuleNotFoundError("No module named 'unrolled.gone'", name="unrolled.gone"), "failed"),
        (ImportError("cannot import name 'f' from 'unrolled'", name="unrolled"), "failed"),
        (MissingError("peer is 1.0,\n expected 2.0"), "missing"),
        (UnsupportedError("not built"), "missing"),
        (NotMeasuredError("no CUDA device"), "not measured"),
        (RuntimeError("it broke"), "failed"),
    ],
)
def test_what_cannot_run_is_reported_and_the_others_are_measured(error, status):
    found = rows(("gone", raising(error), {}), ("here", doubling(), {}))
    assert (found["gone"].status, found["gone"].reason) == (status, " ".join(str(error).split()))
    assert found["gone"].median is None
    assert found["here"].median > 0


def test_the_best_peer_is_the_fastest_that_is_right_and_not_ours(monkeypatch):
    times = {"ours": [1.0], "slow": [8.0], "fast": [4.0]}
    monkeypatch.setattr(runner, "take_turns", lambda runs, **_: {name: times[name] for name in runs})
    found = rows(
        ("ours", doubling(), {"ours": True}),
        ("slow", doubling(), {}),
        ("fast", doubling(), {}),
        ("cheat", doubling(1.0), {}),
    )
    assert [found[name].best_peer for name in times] == [4.0, 4.0, 4.0]
    assert found["cheat"].best_peer is None


def test_a_peer_of_another_function_is_not_the_best_one(monkeypatch):
    monkeypatch.setattr(runner, "take_turns", lambda runs, **_: {name: [len(name)] for name in runs})
    own, other = problem(("ours", doubling(), {"ours": True})), problem(("peer", doubling(), {}))
    [faster] = (dataclasses.replace(x, name="f", definition="other") for x in other.contenders)
    kinds = own.definitions | {"other": own.definitions["double"]}
    made = Problem([*own.contenders, *other.contenders, faster], kinds)
    found = runner.run_problem(made, Settings(), LIMITS)
    assert [row.best_peer for row in found] == [4.0, 4.0, 1.0]


def test_a_peer_with_more_threads_is_not_the_best_one(monkeypatch):
    monkeypatch.setattr(runner, "take_turns", lambda runs, **_: {name: [len(name)] for name in runs})
    found = rows(
        ("ours", doubling(), {"ours": True}),
        ("alone", doubling(), {}),
        ("two", doubling(), {"threads": 2}),
    )
    assert [row.best_peer for row in found.values()] == [5.0, 5.0, 3.0]


def test_some_may_be_chosen_by_a_word_of_their_names():
    chosen = Settings(seconds=0.0, only=("b", "z"))
    two = problem(("ours a", doubling(), {}), ("ours b", doubling(), {}))
    assert [row.contender for row in runner.run_problem(two, chosen, LIMITS)] == ["ours b"]


def test_cases_without_a_chosen_contender_are_left_out(wrong_case):
    only = partial(Settings, quick=True)
    other = dataclasses.replace(cases.find("threads"), name="other")
    both = [wrong_case, other]
    assert runner.matching(both, only(only=("cheat", "nobody"))) == [wrong_case]
    assert runner.matching(both, only(only=("native", "cheat"))) == both
    with pytest.raises(ValueError, match="--only is 'ch', but the contenders are: right; cheat; unrolled "):
        runner.matching(both, only(only=("ch",)))


def test_the_command_measures_each_chosen_case_once(wrong_case, tmp_path):
    names = ["linear-forward", "doubling", "doubling"]
    run("bench", *names, "--only", "cheat", "--quick", "--out", tmp_path)
    found = Report.from_json((tmp_path / "results.json").read_text())
    assert [(row.case, row.size, row.contender) for row in found.rows] == [
        ("doubling", 1, "cheat"),
        ("doubling", 2, "cheat"),
    ]


def test_a_word_ends_at_a_comma():
    one = problem(("unrolled, plan in fp32", doubling(), {}), ("other", doubling(), {}))
    [row] = runner.run_problem(one, Settings(seconds=0.0, only=("unrolled",)), LIMITS)
    assert row.contender == "unrolled, plan in fp32"


def test_other_work_is_told_only_where_each_contender_has_one_thread():
    for threads, known in ((1, True), (2, False)):
        [row] = runner.run_problem(
            problem(("a", doubling(), {})), Settings(threads=threads, seconds=0.0), LIMITS
        )
        assert (row.working is not None) == known


def test_other_work_is_not_told_if_one_of_the_contenders_has_two_threads():
    found = rows(("one", doubling(), {}), ("two", doubling(), {"threads": 2}))
    assert [row.working for row in found.values()] == [None, None]


def test_contenders_run_on_their_own_number_of_threads():
    seen = {}

    def noting(name):
        def run():
            seen.setdefault(name, set()).add(torch.get_num_threads())
            return [2 * X]

        return lambda: run

    found = rows(("one", noting("one"), {}), ("two", noting("two"), {"threads": 2}))
    assert seen == {"one": {1}, "two": {2}}
    assert found["two"].threads == 2
    assert found["two"].share_of_flops == found["two"].flops / 2e9
    assert found["two"].share_of_copying is None  # what two threads may copy was not measured


@pytest.fixture
def wrong_case(monkeypatch):
    """A case with a contender that is a little wrong, in the place of all others."""
    made = problem(("right", doubling(), {}), ("cheat", doubling(2.002), {"ours": True}))
    sizes = (1, 2), (1, 2)
    wrong = case.Case("doubling", "Twice a number.", "N", *sizes, lambda size, settings: made)
    monkeypatch.setitem(cases.CASES, "doubling", wrong)
    return wrong


def test_the_command_refuses_to_print_a_speed_for_a_wrong_result(wrong_case, tmp_path):
    result = run("bench", "doubling", "--quick", "--out", tmp_path)
    assert result.exit_code == 1
    assert "| all | cheat | wrong: max error 0.001 in y" in result.stdout
    assert "| 1 | right |" in result.stdout
    assert "| 1 | cheat |" not in result.stdout
    assert result.stderr.endswith("refused: cheat (doubling)\n")
    assert (tmp_path / "results.json").exists()


def test_a_report_replaces_an_earlier_one(wrong_case, tmp_path):
    for name in ("linear-forward-time.png", "linear-forward-memory.png", "mine.png"):
        (tmp_path / name).touch()
    run("bench", "doubling", "--quick", "--force", "--out", tmp_path)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures - {"doubling-time.png"} == {"mine.png"}


def test_remarks_come_with_their_size(wrong_case):
    remarked = problem(("a", doubling(), {}), remark=lambda medians: f"of {sorted(medians)}")
    noted = dataclasses.replace(wrong_case, problem=lambda size, settings: remarked)
    found, remarks = runner.run_case(noted, Settings(quick=True, seconds=0.0), LIMITS)
    assert remarks == ["N = 1: of ['a']", "N = 2: of ['a']"]
    assert [(row.case, row.size) for row in found] == [("doubling", 1), ("doubling", 2)]


def with_memory(monkeypatch, wrong_case, peaks, **settings):
    """Run a case whose contenders, but for "cheat", need the memory that `peaks` tells."""
    made = problem(("right", doubling(), {}), ("other", doubling(), {}), ("cheat", doubling(1.0), {}))
    monkeypatch.setattr(runner.memory, "peaks", peaks)
    measured = dataclasses.replace(wrong_case, problem=lambda size, settings: made, memory=True)
    found, remarks = runner.run_case(measured, Settings(seconds=0.0, **settings), LIMITS)
    return {(row.contender, row.size): row.peak_bytes for row in found}, remarks


def test_each_time_has_the_peak_memory_of_its_contender_at_its_size(monkeypatch, wrong_case):
    def peaks(case, name, sizes, settings):
        assert name != "cheat", "it was refused"
        return {size: len(name) * 10**size for size in sizes}

    found, remarks = with_memory(monkeypatch, wrong_case, peaks)
    assert found == {
        ("right", 1): 50, ("other", 1): 50, ("cheat", 1): None,
        ("right", 2): 500, ("other", 2): 500, ("cheat", 2): None,
    }  # fmt: skip
    assert remarks == []


def test_memory_is_measured_at_the_sizes_that_have_a_time(monkeypatch, wrong_case):
    asked = {}

    def peaks(case, name, sizes, settings):
        asked[name] = list(sizes)
        return dict.fromkeys(sizes, 7)

    def made(size, settings):
        small_only = raising(NotMeasuredError("too long")) if size > 1 else doubling()
        return problem(("small", small_only, {}), ("any", doubling(), {}))

    monkeypatch.setattr(runner.memory, "peaks", peaks)
    measured = dataclasses.replace(wrong_case, problem=made, memory=True)
    found, _ = runner.run_case(measured, Settings(seconds=0.0), LIMITS)
    assert asked == {"small": [1], "any": [1, 2]}
    assert {(row.contender, row.size): row.peak_bytes for row in found}["small", 2] is None


def test_why_a_peak_is_unknown_is_a_remark(monkeypatch, wrong_case):
    def peaks(case, name, sizes, settings):
        if name == "right":
            raise RuntimeError("it was killed")
        return dict.fromkeys(sizes, 7)

    found, remarks = with_memory(monkeypatch, wrong_case, peaks)
    assert [found[name, 2] for name in ("right", "other")] == [None, 7]
    assert remarks == ["peak memory of right: not measured: it was killed"]


def test_a_quick_run_measures_no_memory(monkeypatch, wrong_case):
    found, _ = with_memory(monkeypatch, wrong_case, lambda *_: pytest.fail("measured"), quick=True)
    assert set(found.values()) == {None}


def test_a_tolerance_is_far_below_a_wrong_answer_and_above_rounding():
    for terms in (64, 4096, 65_536):
        x = torch.rand(terms, generator=torch.Generator().manual_seed(terms)) + 0.5
        one_by_one = x.cumsum(0)[-1]
        error = abs(float(one_by_one) / float(x.double().sum()) - 1)
        assert error < case.tolerance(torch.float32, terms) < 1 / 512
    assert case.tolerance(torch.float32, 64) < case.tolerance(torch.bfloat16, 64) < 0.02


def test_the_limits_without_and_with_native_kernels(monkeypatch):
    settings = Settings(threads=2, quick=True)
    monkeypatch.setattr(machine.native, "missing", lambda: "no compiler was found")
    found = machine.limits(settings)
    assert found.flops is None
    assert found.flops_missing == "no compiler was found"
    assert found.copying > 1e8
    assert found.reading > 1e8
    monkeypatch.setattr(machine.native, "missing", lambda: None)
    monkeypatch.setattr(machine.native, "fma_peak", lambda: 5e10)
    assert machine.limits(settings).flops == 1e11  # of two threads


def test_copying_counts_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setattr(machine, "_seconds", lambda run, settings: 0.5)
    found = machine.limits(Settings(quick=True))
    assert found.copying == 2 * found.reading == 4 * (machine.BUFFER >> 4)


def test_a_limit_is_that_of_the_fastest_run(monkeypatch):
    monkeypatch.setattr(machine, "take_turns", lambda runs, **_: {name: [4.0, 0.5, 2.0] for name in runs})
    assert machine.seconds_to_read(1000, Settings(quick=True)) == 0.5


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setattr(machine, "version", lambda package: "1.0")
    described = machine.describe(Settings(threads=3))
    assert described["threads"] == 3
    assert described["versions"].keys() >= {"unrolled", "python", "torch", "numpy", "llama-cpp-python"}
    assert described["processor"]


@pytest.mark.slow
@pytest.mark.skipif(not memory.CLEAR.exists(), reason="the system does not report the peak of a process")
def test_peak_memory_is_what_a_job_adds_to_what_is_held():
    held = torch.ones(30_000_000)  # 120 MB that do not count

    def job():
        fresh = mmap.mmap(-1, 40_000_000)  # what malloc has from earlier tests is held already
        return [torch.add(held[:10_000_000], 1, out=torch.frombuffer(fresh, dtype=torch.float32))]

    assert memory.peak(job) == pytest.approx(40e6, rel=0.05)
    job()
    assert memory.peak(lambda: None) < 2e6  # what came before does not count either


@pytest.mark.slow
@pytest.mark.skipif(not memory.CLEAR.exists(), reason="the system does not report the peak of a process")
def test_peak_memory_in_a_process_of_its_own():
    found = memory.peaks(cases.find("linear-forward"), "unrolled plain", [1024, 2048], Settings())
    output = 8 * 64 * 4  # bytes of a token
    assert 1024 * output < found[1024] < found[2048] < 2048 * 20 * output


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="the system does not report the peak of a process")
def test_an_end_of_that_process_is_reported(tmp_path, monkeypatch):
    ending = tmp_path / "python"
    ending.write_text("#!/bin/sh\necho first >&2; echo StopIteration >&2; exit 1\n")
    ending.chmod(0o700)
    monkeypatch.setattr(memory.sys, "executable", str(ending))
    with pytest.raises(RuntimeError, match="measures the memory of nobody ended: StopIteration"):
        memory.peaks(cases.find("linear-forward"), "nobody", [64], Settings())
