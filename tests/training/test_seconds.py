"""A run of so many seconds, on a clock of its own: each batch to train on takes 2 s, each to evaluate 5 s."""

from types import SimpleNamespace

import pytest

from unrolled.training import config as settings
from unrolled.training import forecast, read_log

from .standin import Cycles, StandIn, config, run

EVALUATION = 3 * 5  # three batches


@pytest.fixture
def slow(monkeypatch):
    now = 0.0

    class Slow(StandIn):
        def loss(self, inputs, targets):
            nonlocal now
            now += 2 if self.training else 5
            return super().loss(inputs, targets)

    clocks = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now / 2)
    monkeypatch.setattr(settings, "time", clocks)
    return Slow


def test_it_ends_when_the_time_is_over_and_evaluates_once_more(tmp_path, slow):
    result = run(tmp_path, model=slow(), seconds=40, steps=2, eval_every=5)
    # 5 steps and an evaluation in 25 s, as many again in 50
    assert result.steps == 10
    assert [x["step"] for x in read_log(tmp_path / "log.jsonl") if x["event"] == "eval"] == [5, 10]
    assert result.seconds == 10 * 2 + 2 * EVALUATION
    result = run(tmp_path / "odd", model=slow(), seconds=11, steps=2, eval_every=99)
    assert (result.steps, result.seconds) == (6, 12 + EVALUATION)


def test_it_evaluates_once_more_if_the_time_runs_out_between_two_steps(tmp_path, slow, monkeypatch):
    lines = []

    def tell(line):
        lines.append(line["event"])
        if len(lines) == 3:  # in the second step, after its time was taken
            monkeypatch.setattr(settings, "time", SimpleNamespace(perf_counter=lambda: 99))

    result = run(
        tmp_path, model=slow(), seconds=40, eval_every=99, log_every=1, checkpoint_every=1, on_line=tell
    )
    assert lines == ["start", "train", "train", "eval"]
    assert result.steps == 2
    assert result.best_val == result.last_val is not None


def test_the_clock_may_be_that_of_the_processor(tmp_path, slow):
    """Half of the time, other work has the core."""
    result = run(tmp_path, model=slow(), seconds=20, clock="cpu", eval_every=99)
    assert (result.steps, result.seconds) == (20, 20 + EVALUATION / 2)
    found = forecast.dry_run(slow(), Cycles(), config(seconds=175, clock="cpu", eval_every=10))
    assert (found.steps, found.seconds, found.mfu) == (100, 175, None)


def test_the_rate_follows_the_time(tmp_path, slow):
    run(tmp_path, model=slow(), seconds=20, lr=1.0, min_lr=0.5, warmup_steps=0, log_every=1, eval_every=99)
    rates = [x["lr"] for x in read_log(tmp_path / "log.jsonl") if x["event"] == "train"]
    assert len(rates) == 10
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.75)
    assert rates == sorted(rates, reverse=True)


def test_seconds_are_those_of_all_processes(tmp_path, slow):
    options = {"schedule": "constant", "eval_every": 99}
    run(tmp_path, model=slow(), seconds=10, **options)
    assert run(tmp_path, model=slow(), seconds=60, **options).steps == 5 + (60 - 10 - EVALUATION) / 2 + 0.5
    assert run(tmp_path, model=slow(), seconds=60, **options).steps == 23


def test_with_a_cosine_the_time_is_held(tmp_path, slow):
    run(tmp_path, model=slow(), seconds=10)
    with pytest.raises(ValueError, match=r"train\.seconds was 10 and is now 20"):
        run(tmp_path, model=slow(), seconds=20)


def test_a_dry_run_estimates_the_steps(slow):
    found = forecast.dry_run(slow(), Cycles(), config(seconds=350, eval_every=10))
    assert (found.steps, found.evaluations) == (100, 10)
    assert found.seconds == 350


def test_a_dry_run_of_a_resumed_run_counts_the_time_that_is_left(tmp_path, slow):
    options = {"schedule": "constant", "eval_every": 10}
    run(tmp_path, model=slow(), seconds=35, **options)  # 10 steps and an evaluation
    found = forecast.dry_run(slow(), Cycles(), config(seconds=385, **options), tmp_path)
    assert (found.step, found.steps) == (10, 110)
    assert found.seconds == 350
    ended = forecast.dry_run(slow(), Cycles(), config(seconds=35, **options), tmp_path)
    assert (ended.step, ended.steps, ended.measured, ended.seconds) == (10, 10, 0, 0)
