import json
import math
import signal
import sys

import pytest
import torch

from unrolled import alignment
from unrolled.contract import UnsupportedError
from unrolled.models import Decoder, DecoderConfig
from unrolled.training import evaluate, read_log, train

from .standin import VOCAB, Batch, Cycles, StandIn, config, losses, run, same, weights


def test_it_learns_and_keeps_the_best_weights(tmp_path):
    model = StandIn(dropout=0.0)
    result = run(tmp_path, model=model, steps=150, eval_every=50, lr=3e-2)
    assert result.best_val < 0.8 < math.log(VOCAB)
    assert not model.training
    best = StandIn(seed=3, dropout=0.0)
    stored = {p.name for p in tmp_path.iterdir()}
    assert stored == {"config.json", "model.safetensors", "last.safetensors", "log.jsonl", ".lock"}
    best.load_state_dict(
        {n.removeprefix("model."): x for n, x in weights(tmp_path).items() if n.startswith("model.")}
        | {"head.weight": weights(tmp_path)["model.embedding.weight"]}
    )
    assert evaluate(best, Cycles(), config()) == result.last_val


def test_best_is_not_last(tmp_path):
    """A rate that blows the weights up after the first evaluation must not replace the best."""

    class Worsens(StandIn):
        def loss(self, inputs, targets):
            return super().loss(inputs, targets) + (0.0 if self.training else 0.1 * float(self.calls))

    result = run(tmp_path, model=Worsens(), steps=9, lr=1e-9, eval_every=3)
    evals = [x for x in read_log(tmp_path / "log.jsonl") if x["event"] == "eval"]
    assert result.best_val == evals[0]["loss"] == evals[-1]["best"]
    assert result.last_val == evals[-1]["loss"] > result.best_val


def test_the_log(tmp_path):
    run(tmp_path, steps=7)
    lines = read_log(tmp_path / "log.jsonl")
    assert [(x["event"], x["step"]) for x in lines] == [
        ("start", 0), ("train", 2), ("eval", 3), ("train", 4), ("train", 6), ("eval", 6), ("eval", 7),
    ]  # fmt: skip
    assert lines[0]["config"]["lr"] == 0.01
    assert lines[1]["tokens_per_second"] > 0
    assert [x["peak_bytes"] > 10**8 for x in lines if x["event"] == "eval"] == [True] * 3  # of the process
    assert lines[1]["lr"] == pytest.approx(0.01 * 2 / 3)
    assert lines[2]["bits"] == lines[2]["loss"] / math.log(2)


def test_a_torn_last_line_is_not_read_and_is_dropped_on_resume(tmp_path):
    run(tmp_path)
    log = tmp_path / "log.jsonl"
    whole = read_log(log)
    log.write_text(log.read_text() + '{"event": "train", "st')
    assert read_log(log) == whole
    run(tmp_path)
    assert read_log(log)[:-1] == whole
    assert read_log(log)[-1]["event"] == "resume"


class OneBigBatch(Cycles):
    """The micro-batches of a step as one batch."""

    def __init__(self, accumulate):
        super().__init__()
        self.accumulate = accumulate

    def batch(self, split, *, step, batch_size, seed):
        small = batch_size // self.accumulate
        parts = [
            super(OneBigBatch, self).batch(split, step=s, batch_size=small, seed=seed)
            for s in range(step * self.accumulate, (step + 1) * self.accumulate)
        ]
        return Batch(*map(torch.cat, zip(*(part[:2] for part in parts), strict=True)))


def test_accumulation_is_the_large_batch_also_when_targets_are_hidden_unevenly(tmp_path):
    small, large = (StandIn(dropout=0.0).double() for _ in range(2))
    run(tmp_path / "small", model=small, accumulate=3, batch_size=2)
    run(tmp_path / "large", model=large, data=OneBigBatch(3), batch_size=6)
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_evaluation_weighs_by_targets_and_ignores_the_batch_size(tmp_path):
    model = StandIn().double()
    uneven = list(Cycles().eval_batches(0))
    assert len({int((b.targets != -100).sum()) for b in uneven}) > 1

    class Whole(Cycles):
        def eval_batches(self, batch_size):
            yield Batch(*map(torch.cat, zip(*(batch[:2] for batch in uneven), strict=True)))
            yield Batch(torch.zeros(1, 12, dtype=torch.long), torch.full((1, 12), -100))

    assert evaluate(model, Cycles(), config()) == pytest.approx(evaluate(model, Whole(), config()), rel=1e-12)
    first = Cycles(val_sizes=(5,))
    assert evaluate(model, Cycles(), config(eval_batches=1)) == evaluate(model, first, config())


def test_evaluation_does_not_touch_training(tmp_path):
    class Restless(StandIn):
        def loss(self, inputs, targets):
            if not self.training:
                torch.rand(3)
            return super().loss(inputs, targets)

    run(tmp_path / "often", model=Restless(), eval_every=1)
    run(tmp_path / "never", model=Restless(), eval_every=100)
    assert same(weights(tmp_path / "often"), weights(tmp_path / "never"))


def test_the_callers_random_state_and_threads_are_left_alone(tmp_path):
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run(tmp_path, threads=threads + 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, bad):
    class Breaks(StandIn):
        def loss(self, inputs, targets):
            return super().loss(inputs, targets) * (bad if self.calls == 6 else 1.0)

    with pytest.raises(FloatingPointError, match=rf"the loss of step 6 is {bad:g} .* lower lr"):
        run(tmp_path, model=Breaks())
    assert weights(tmp_path)["model.calls"] == 4
    assert all(x.isfinite().all() for x in weights(tmp_path).values())


def test_a_batch_or_split_without_targets_is_refused(tmp_path):
    class Empty(Cycles):
        def batch(self, split, *, step, batch_size, seed):
            batch = super().batch(split, step=step, batch_size=batch_size, seed=seed)
            return Batch(batch.inputs, torch.full_like(batch.targets, -100))

    with pytest.raises(ValueError, match="training batch of step 1 has no target"):
        run(tmp_path / "a", data=Empty())
    with pytest.raises(ValueError, match="validation split has no target"):
        run(tmp_path / "b", data=Cycles(val_sizes=()))


def test_an_unwritable_folder_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    model = StandIn()
    with pytest.raises(ValueError, match=r"run_dir .*file/run cannot be written to: Not a directory"):
        run(tmp_path / "file" / "run", model=model)
    with pytest.raises(ValueError, match=r"run_dir .*file cannot be written to"):
        run(tmp_path / "file", model=model)
    assert model.calls == 0


def test_a_model_that_cannot_be_trained_is_refused_and_makes_no_folder(tmp_path):
    message = r"model is a StandIn, but must have loss\(inputs, targets\), save\(folder\) and a dataclass"
    for name, lacking in {"config": {}, "save": None, "loss": None}.items():
        model = StandIn()
        setattr(model, name, lacking)
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", model=model)
    model = StandIn()
    model.config.width = torch.float32
    with pytest.raises(
        ValueError, match="config of this StandIn must hold JSON values: Object of type dtype"
    ):
        run(tmp_path / "run", model=model)
    model = StandIn()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="the model has nothing to train"):
        run(tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()


def test_activation_checkpointing_needs_a_model_that_can(tmp_path):
    able, unable = StandIn(), StandIn()
    run(tmp_path / "a", model=able, gradient_checkpointing=True, steps=1)
    assert able.gradient_checkpointing
    del unable.gradient_checkpointing
    with pytest.raises(UnsupportedError, match="StandIn cannot recompute activations"):
        run(tmp_path / "b", model=unable, gradient_checkpointing=True)


def test_hard_attention_is_not_trained_by_a_loss(tmp_path):
    model = StandIn()
    model.attention = alignment.load("hard")(4)
    with pytest.raises(UnsupportedError, match="the loss does not train HardAttention: use hard"):
        run(tmp_path / "a", model=model)
    model.attention = alignment.load("hard.StraightThroughAttention")(4)
    run(tmp_path / "b", model=model, steps=1)


def test_the_bar_shows_loss_speed_and_time_left(tmp_path, capfd):
    train(StandIn(), Cycles(), config(steps=2), tmp_path, progress=True)
    shown = capfd.readouterr().err
    assert "2/2" in shown
    assert "loss" in shown
    assert "tokens/s" in shown


def test_a_run_that_has_ended_says_so(tmp_path, capfd):
    train(StandIn(), Cycles(), config(steps=2), tmp_path)
    assert "already" not in capfd.readouterr().err
    train(StandIn(), Cycles(), config(steps=2), tmp_path)
    assert "The run already ended, after step 2." in capfd.readouterr().err


def test_a_signal_after_the_last_evaluation_stops_nothing(tmp_path, capfd):
    def last(line):
        if (line["event"], line["step"]) == ("eval", 2):
            signal.raise_signal(signal.SIGINT)

    result = train(StandIn(), Cycles(), config(steps=2), tmp_path, on_line=last)
    assert (result.steps, result.signal) == (2, None)
    assert "Stopped" not in capfd.readouterr().err


def test_tensorboard_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match=r"run pip install '\.\[tensorboard\]' in a clone"):
        run(tmp_path, tensorboard=True)


def test_tensorboard_gets_what_the_log_gets(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    logged = [x for x in read_log(tmp_path / "log.jsonl") if x["event"] == "eval"]
    assert [x.step for x in events.Scalars("eval/loss")] == [x["step"] for x in logged]
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 16, "dropout": 0.2}


def test_an_infinite_validation_loss_stops(tmp_path):
    class Overflows(StandIn):
        def loss(self, inputs, targets):
            return super().loss(inputs, targets) * (1.0 if self.training else math.inf)

    with pytest.raises(FloatingPointError, match="the validation loss after step 3 is inf: lower lr"):
        run(tmp_path, model=Overflows())
    assert not (tmp_path / "model.safetensors").exists()


def test_dropout_is_that_of_the_seed_whatever_the_callers_random_state(tmp_path):
    for folder, state in (("a", 1), ("b", 2)):
        torch.manual_seed(state)
        run(tmp_path / folder)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_training_runs_on_the_threads_of_the_config(tmp_path):
    class Counts(StandIn):
        def loss(self, inputs, targets):
            found.add(torch.get_num_threads())
            return super().loss(inputs, targets)

    found, threads = set(), torch.get_num_threads() + 1
    run(tmp_path, model=Counts(), steps=2, threads=threads)
    assert found == {threads}


def test_a_gradient_that_is_not_finite_stops_too(tmp_path):
    class Steep(StandIn):
        """The root of zero: a finite loss, with an infinite gradient."""

        def loss(self, inputs, targets):
            zero = 0.0 * self.norm.bias[0]
            return super().loss(inputs, targets) + (zero.sqrt() if self.calls == 5 else 0.0)

    with pytest.raises(FloatingPointError, match=r"step 5 is .* with a gradient of norm nan .* lower lr"):
        run(tmp_path, model=Steep())
    assert all(x.isfinite().all() for x in weights(tmp_path).values())


def test_the_norm_in_the_log_is_the_euclidean_one_before_clipping(tmp_path):
    model, other = StandIn(dropout=0.0), StandIn(dropout=0.0)
    run(tmp_path, model=model, steps=1, log_every=1, clip_norm=1e-2)
    batch = Cycles().batch("train", step=0, batch_size=4, seed=0)
    other.loss(batch.inputs, batch.targets).backward()
    norm = torch.cat([x.grad.flatten() for x in other.parameters()]).norm().item()
    (line,) = [x for x in read_log(tmp_path / "log.jsonl") if x["event"] == "train"]
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = torch.cat([x.grad.flatten() for x in model.parameters()]).norm().item()
    assert clipped == pytest.approx(1e-2, rel=1e-3)


def test_without_clip_norm_nothing_is_clipped(tmp_path):
    class Scaled(StandIn):
        def loss(self, inputs, targets):
            return 100 * super().loss(inputs, targets)

    model = Scaled(dropout=0.0)
    run(tmp_path, model=model, steps=1, log_every=1, clip_norm=None)
    (line,) = [x for x in read_log(tmp_path / "log.jsonl") if x["event"] == "train"]
    found = torch.cat([x.grad.flatten() for x in model.parameters()]).norm().item()
    assert found == pytest.approx(line["grad_norm"], rel=1e-5)
    assert found > 1


def test_the_loss_in_the_log_is_the_mean_since_the_last_line(tmp_path):
    run(tmp_path / "each", log_every=1)
    run(tmp_path / "third", log_every=3)
    each = [x for event, _, x in losses(tmp_path / "each") if event == "train"]
    third = [x for event, _, x in losses(tmp_path / "third") if event == "train"]
    assert third == pytest.approx([sum(each[i : i + 3]) / 3 for i in range(0, 12, 3)], rel=1e-12)


@pytest.mark.parametrize("segment", [None, 5])
def test_bf16_is_that_of_training_and_of_evaluation(tmp_path, segment):
    class Precise(Decoder):
        def _note(self, inputs):
            if inputs.shape[1] > 1:  # one token is read to check the model
                found.add((self.training, torch.is_autocast_enabled("cpu")))

        def loss(self, inputs, targets):
            self._note(inputs)
            return super().loss(inputs, targets)

        def loss_from(self, inputs, *rest, **options):
            self._note(inputs)
            return super().loss_from(inputs, *rest, **options)

    size = DecoderConfig(VOCAB, d_model=8, n_layers=1, n_heads=2, positions="rotary")
    for bf16 in (True, False):
        found = set()
        run(tmp_path / str(bf16), model=Precise(size), steps=1, bf16=bf16, segment=segment)
        assert found == {(True, bf16), (False, bf16)}


def test_a_missing_tensorboard_leaves_an_earlier_run_whole(tmp_path, monkeypatch):
    run(tmp_path, steps=4)
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError):
        run(tmp_path, resume=False, tensorboard=True)
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before


def test_a_resumed_run_keeps_the_steps_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (4, 8):
        run(tmp_path, steps=steps, schedule="constant", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [x.step for x in events.Scalars("train/loss")] == [2, 4, 6, 8]


def test_a_damaged_log_is_found_before_the_run_begins(tmp_path):
    run(tmp_path, steps=4, schedule="constant")
    log = tmp_path / "log.jsonl"
    log.write_text("damaged\n" + log.read_text())
    started = []
    with pytest.raises(ValueError, match=r"log\.jsonl is damaged: line 1 is not JSON"):
        run(tmp_path, steps=6, schedule="constant", on_start=started.append)
    assert not started


def test_a_model_without_parameters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model is a Identity without parameters"):
        run(tmp_path, model=torch.nn.Identity())
    with pytest.raises(ValueError, match=r"model is a dict, but must be a torch\.nn\.Module"):
        run(tmp_path, model={"a": 1})
