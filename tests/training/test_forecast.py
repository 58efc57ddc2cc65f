"""A dry run forecasts memory and time, makes the steps that the run would make, and writes nothing."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unrolled.contract import UnsupportedError
from unrolled.training import config as settings
from unrolled.training import dry_run, read_log, train
from unrolled.training import forecast as forecasting
from unrolled.training.utilisation import flops_per_token

from .standin import VOCAB, Cycles, StandIn, config, run

WIDTH = 16
TIED = VOCAB * WIDTH  # the embedding and the head share it
SHAPES = [TIED, 2 * WIDTH * WIDTH, WIDTH, WIDTH, WIDTH, VOCAB]  # hidden, its bias, the norm, the head's bias
PARAMETERS = sum(SHAPES)


def forecast(model=None, data=None, run_dir=None, *, resume=True, **options):
    return dry_run(model or StandIn(), data or Cycles(), config(**options), run_dir, resume=resume)


@pytest.mark.parametrize("optimizer", ["adamw", "radam", "muon"])
def test_memory_is_that_of_the_definition(optimizer):
    """Two moments of each number, and a counter of four bytes for each tensor; Muon has one moment only."""
    found = forecast(optimizer=optimizer)
    assert found.parameters == PARAMETERS
    assert found.weight_bytes == found.gradient_bytes == 4 * PARAMETERS
    less = 4 * SHAPES[1] + 4 if optimizer == "muon" else 0
    assert found.optimizer_bytes == 2 * 4 * PARAMETERS + 4 * len(SHAPES) - less


def test_what_is_not_trained_has_no_gradient_and_no_moments():
    model = StandIn()
    model.blocks.requires_grad_(False)
    found = forecast(model)
    trained = PARAMETERS - 2 * WIDTH * WIDTH - WIDTH
    assert found.weight_bytes == 4 * PARAMETERS
    assert found.gradient_bytes == 4 * trained
    assert found.optimizer_bytes == 2 * 4 * trained + 4 * (len(SHAPES) - 2)


def test_the_weights_are_those_of_the_run_after_as_many_steps(tmp_path):
    short, whole = StandIn().eval(), StandIn()  # dropout would differ if the mode stayed eval
    forecast(short, steps=30, schedule="constant")
    run(tmp_path, model=whole, steps=10, schedule="constant")
    for a, b in zip(short.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_nothing_is_written_and_the_callers_state_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    forecast(run_dir=tmp_path / "run", threads=threads + 1)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_folder_is_gone_on_from_as_train_would_and_stays_as_it_is(tmp_path):
    run(tmp_path, steps=4, schedule="constant")
    before = {x.name: (x.read_bytes(), x.stat().st_mtime_ns) for x in tmp_path.iterdir()}
    short, whole = StandIn(), StandIn()
    found = forecast(short, run_dir=tmp_path, steps=9, schedule="constant")
    assert (found.step, found.measured) == (4, 5)
    assert {x.name: (x.read_bytes(), x.stat().st_mtime_ns) for x in tmp_path.iterdir()} == before
    train(whole, Cycles(), config(steps=9, schedule="constant"), tmp_path, progress=False)
    for a, b in zip(short.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    done = forecast(run_dir=tmp_path, steps=9, schedule="constant")
    assert (done.step, done.measured, done.evaluations, done.seconds) == (9, 0, 0, 0)
    assert forecast(run_dir=tmp_path, resume=False, steps=9).step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 2e-2}, r"cannot be resumed: train\.lr was 0\.01 and is now 0\.02"),
        ({"model": StandIn(width=8)}, "cannot be resumed: model.width was 16 and is now 8"),
        ({"schedule": "constant", "steps": 2}, "steps is 2, but .* is already at step 4"),
    ],
)
def test_a_checkpoint_that_train_would_refuse_is_refused(options, message, tmp_path):
    run(tmp_path, steps=4, schedule="constant")
    settings = {"steps": 4, "schedule": "constant"} | options
    for attempt in (forecast, run):
        with pytest.raises(ValueError, match=message):
            attempt(run_dir=tmp_path, **settings)


def test_what_train_refuses_is_refused():
    with pytest.raises(FloatingPointError, match=r"the loss of step 2 is .*: lower lr"):
        forecast(lr=1e30, warmup_steps=0, clip_norm=None)
    model = StandIn()
    del model.gradient_checkpointing
    with pytest.raises(UnsupportedError, match="StandIn cannot recompute activations"):
        forecast(model, gradient_checkpointing=True)


@pytest.fixture
def slow(monkeypatch):
    """A model on a clock of its own: each batch to train on takes 2 s, the first 100 s, each to evaluate 5 s."""
    now = 0.0

    class Slow(StandIn):
        def loss(self, inputs, targets):
            nonlocal now
            now += (2 if self.calls else 100) if self.training else 5
            return super().loss(inputs, targets)

    monkeypatch.setattr(settings, "time", SimpleNamespace(perf_counter=lambda: now))
    return Slow()


def test_time_is_that_of_the_steps_and_of_the_evaluations(slow):
    found = forecast(slow, steps=1000, eval_every=300, accumulate=2, batch_size=4)
    assert found.step_seconds == 4  # the first step, which is slow, does not count
    assert found.evaluations == 4  # after 300, 600, 900 and 1,000
    assert found.evaluation_seconds == 3 * 5  # three batches
    assert found.seconds == 1000 * found.step_seconds + 4 * found.evaluation_seconds
    assert forecast(slow, steps=1, eval_batches=2).evaluation_seconds == 2 * 5


@pytest.mark.parametrize(("steps", "eval_every"), [(7, 3), (6, 3), (2, 3), (1, 1)])
def test_evaluations_are_as_many_as_the_run_makes(tmp_path, steps, eval_every):
    run(tmp_path, steps=steps, eval_every=eval_every)
    made = [x for x in read_log(tmp_path / "log.jsonl") if x["event"] == "eval"]
    assert forecast(steps=steps, eval_every=eval_every).evaluations == len(made)


def test_tokens_are_those_that_a_step_reads():
    data = Cycles()
    batches = [data.batch("train", step=i, batch_size=4, seed=0) for i in range(20)]
    counts = [x.inputs.numel() for x in batches]
    assert forecast(data=data, accumulate=2, steps=50).tokens == sum(counts) / 10


class Holds(StandIn):
    """Also makes some numbers that the backward pass needs."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def loss(self, inputs, targets):
        loss = super().loss(inputs, targets)
        return loss + 0 * loss.expand(self.numbers).exp().mean()


def test_activations_are_counted():
    small, large = (forecast(Holds(n)).taken.activation_bytes for n in (10**6, 2 * 10**6))
    # at once: the exponentials, the gradients of the mean for them, and the products of both
    assert large - small == 3 * 4 * 10**6
    assert small - 3 * 4 * 10**6 < 4 * 10**5


PEAK = """
import torch
from training.standin import Cycles, StandIn, config
from unrolled.training import dry_run

class Large(StandIn):
    nbytes = 1

    def loss(self, inputs, targets):
        torch.ones(self.nbytes, dtype=torch.uint8)
        return super().loss(inputs, targets)

print(dry_run(Large(), Cycles(), config()).peak_bytes)
Large.nbytes = 2**28
print(dry_run(Large(), Cycles(), config()).peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the system does not report the peak of a process")
def test_the_peak_has_what_a_step_allocates():
    tests = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", PEAK], cwd=tests, capture_output=True, check=True)
    before, after = map(int, run.stdout.split())
    assert after - before == pytest.approx(2**28, rel=0.1)


def test_averages_count_as_memory_of_the_optimiser():
    without, found = forecast(), forecast(ema=0.9)
    assert found.optimizer_bytes - without.optimizer_bytes == 4 * PARAMETERS


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_one_or_two_steps_is_watched_in_the_last(steps):
    assert forecast(steps=steps).taken.activation_bytes > 0


def test_the_third_step_is_watched():
    class Third(StandIn):
        def loss(self, inputs, targets):
            loss = super().loss(inputs, targets)
            return loss + 0 * loss.expand(10**6 if self.calls == 3 else 1).exp().mean()

    assert forecast(Third()).taken.activation_bytes > 4 * 10**6


def test_the_share_of_the_speed_is_that_of_a_step(slow, monkeypatch):
    monkeypatch.setattr(forecasting, "speed_of_products", lambda device, bf16: 1000.0)
    found = forecast(slow, steps=8)
    assert found.mfu == pytest.approx(4 * 12 * flops_per_token(slow) / 2 / 1000)  # 4 rows of 12 tokens in 2 s
