"""A run that is stopped and resumed ends bit for bit as one left alone."""

import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from unrolled.training import evaluate, read_log

from .standin import CallsAt, Cycles, StandIn, config, losses, run, same, weights


class StopError(Exception):
    pass


def stops_at(step: int) -> CallsAt:
    """Data that fail at a step, as if the process had ended there."""

    def stop() -> None:
        raise StopError

    return CallsAt(step, stop)


ALL = [
    {"optimizer": o, "schedule": s}
    for o in ("adamw", "radam", "muon")
    for s in ("cosine", "plateau", "constant")
]
EXTRAS = [{"accumulate": 3}, {"bf16": True}, {"gradient_checkpointing": True}, {"clip_norm": None}]


@pytest.mark.parametrize("changes", ALL + EXTRAS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_resume_is_bit_for_bit(tmp_path, changes):
    options = {"eval_every": 1, "steps": 14, **changes}
    alone = run(tmp_path / "alone", **options)
    for step in (2, 7, 10):
        with pytest.raises(StopError):
            run(tmp_path / "cut", data=stops_at(step * options.get("accumulate", 1)), **options)
    # a model with other weights and a process with another random state: all must come from the checkpoint
    torch.manual_seed(12345)
    cut = run(tmp_path / "cut", model=StandIn(seed=9), **options)
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "cut"))
    assert (cut.best_val, cut.last_val, cut.steps) == (alone.best_val, alone.last_val, alone.steps)
    assert losses(tmp_path / "alone") == losses(tmp_path / "cut")
    best = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("alone", "cut")]
    assert best[0] == best[1]


def test_without_the_random_state_the_runs_would_differ(tmp_path, monkeypatch):
    """So dropout is at work, and the comparison above can fail."""
    run(tmp_path / "alone")
    with pytest.raises(StopError):
        run(tmp_path / "cut", data=stops_at(7))
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    run(tmp_path / "cut")
    assert not same(weights(tmp_path / "alone"), weights(tmp_path / "cut"))


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = run(tmp_path)
    before = weights(tmp_path)
    again = run(tmp_path, model=StandIn(seed=3))
    assert same(before, weights(tmp_path))
    assert (again.best_val, again.last_val, again.steps) == (first.best_val, first.last_val, first.steps)


@pytest.mark.parametrize("schedule", ["plateau", "constant"])
def test_a_longer_run_goes_on_as_if_it_had_been_asked_for_at_once(tmp_path, schedule):
    # 10 is no multiple of eval_every: the plateau must not see the evaluation that ends the short run
    options = {"schedule": schedule, "eval_every": 3, "lr": 0.3, "warmup_steps": 0}
    run(tmp_path / "long", steps=40, **options)
    run(tmp_path / "extended", steps=10, **options)
    run(tmp_path / "extended", steps=40, **options)
    assert same(weights(tmp_path / "long"), weights(tmp_path / "extended"))


def test_gradients_left_on_the_model_do_not_count(tmp_path):
    model = StandIn()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run(tmp_path / "left", model=model)
    run(tmp_path / "none")
    assert same(weights(tmp_path / "left"), weights(tmp_path / "none"))


def test_resume_false_starts_over(tmp_path):
    run(tmp_path, seed=5)
    run(tmp_path, resume=False)
    run(tmp_path / "fresh")
    assert same(weights(tmp_path), weights(tmp_path / "fresh"))
    assert losses(tmp_path) == losses(tmp_path / "fresh")


def test_an_outdated_model_goes_once_the_new_run_has_begun(tmp_path):
    run(tmp_path)
    model = tmp_path / "model.safetensors"

    def failing(resumed):
        raise StopError

    with pytest.raises(StopError):
        run(tmp_path, resume=False, outdated=[model.name], on_start=failing)
    assert model.exists()
    run(tmp_path, outdated=[model.name])
    assert model.exists()  # it is of this run
    for resume in (False, True):  # killed before its first evaluation, once just before the removal
        with pytest.raises(StopError):
            run(tmp_path, resume=resume, outdated=[model.name], data=stops_at(1))
        assert not model.exists()
        model.touch()


@pytest.mark.slow
@pytest.mark.parametrize("step", [9, 21, 33])
def test_a_model_that_is_saved_again_does_not_change_the_schedule(tmp_path, step):
    options = {"schedule": "plateau", "lr": 0.3, "warmup_steps": 0}
    run(tmp_path / "cut", steps=step, **options)
    (tmp_path / "cut" / "model.safetensors").unlink()
    for folder in ("cut", "whole"):
        run(tmp_path / folder, steps=60, **options)
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("step", [8, 12])
def test_a_lost_model_is_saved_again(tmp_path, step):
    """Evaluations follow steps 3, 6, 9 and 12; the model of the last two is the best that is left."""
    options = {"schedule": "constant", "lr": 0.1, "warmup_steps": 0}
    run(tmp_path, steps=step, **options)
    file = tmp_path / "model.safetensors"
    file.unlink()
    result = run(tmp_path, **options)
    evals = [(x["step"], x["loss"]) for x in read_log(tmp_path / "log.jsonl") if x["event"] == "eval"]
    assert [x for x, _ in evals] == sorted({3, 6, 9, 12, step})
    assert result.best_val == min(loss for x, loss in evals if x >= step)
    model = StandIn()
    model.load_state_dict(load_file(file), strict=False)
    assert evaluate(model, Cycles(), config()) == result.best_val


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_finishes_the_step_saves_and_says_so(tmp_path, capfd):
    handler = signal.getsignal(signal.SIGINT)
    result = run(tmp_path / "cut", data=CallsAt(5, press_ctrl_c))
    assert result.steps == 6
    assert "Stopped after step 6" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler
    run(tmp_path / "cut")
    run(tmp_path / "alone")
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "cut"))


def test_an_evaluation_that_is_repeated_twice_is_logged_once(tmp_path):
    class Stopped(Cycles):
        calls = 0

        def eval_batches(self, batch_size):
            self.calls += 1
            for batch in super().eval_batches(batch_size):
                if self.calls == 2:  # the first call is to tell the data apart
                    press_ctrl_c()
                yield batch

    assert run(tmp_path / "cut", data=Stopped()).last_val is None
    with pytest.raises(StopError):
        run(tmp_path / "cut", data=stops_at(3))
    assert losses(tmp_path / "cut")[-1][:2] == ("eval", 3)  # which the checkpoint does not know
    run(tmp_path / "cut")
    run(tmp_path / "alone")
    assert losses(tmp_path / "cut") == losses(tmp_path / "alone")


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", data=CallsAt(5, twice))
    run(tmp_path / "cut")
    run(tmp_path / "alone")
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "cut"))


def test_trains_outside_the_main_thread(tmp_path):
    thread = threading.Thread(target=run, args=(tmp_path,), kwargs={"steps": 2})
    thread.start()
    thread.join()
    assert read_log(tmp_path / "log.jsonl")[-1]["step"] == 2


def test_the_best_model_of_a_run_that_has_ended_is_not_outdated(tmp_path):
    class Worsens(StandIn):
        def loss(self, inputs, targets):
            return super().loss(inputs, targets) + (0.0 if self.training else float(self.calls))

    run(tmp_path, model=Worsens())
    best = (tmp_path / "model.safetensors").read_bytes()
    run(tmp_path, model=Worsens(), outdated=["model.safetensors"])
    assert (tmp_path / "model.safetensors").read_bytes() == best


def test_the_seed_may_not_change_even_if_the_data_do_not_depend_on_it(tmp_path):
    class Fixed(Cycles):
        def batch(self, split, *, step, batch_size, seed):
            return super().batch(split, step=step, batch_size=batch_size, seed=0)

    run(tmp_path, data=Fixed(), steps=4, schedule="constant")
    with pytest.raises(ValueError, match=r"train\.seed was 0 and is now 1"):
        run(tmp_path, data=Fixed(), steps=6, schedule="constant", seed=1)
