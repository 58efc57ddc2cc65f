"""An exponential moving average of the weights: its formula, and where it is used."""

import pytest
import torch

from unrolled.training import evaluate
from unrolled.training.averaging import average, averaged_copy

from .standin import Cycles, StandIn, config, losses, run, same, weights


def test_it_is_its_formula():
    model = StandIn()
    averaged, expected = averaged_copy(model), model.embedding.weight.detach().clone()
    for n in range(1, 30):
        with torch.no_grad():
            model.embedding.weight.add_(n)
        average(averaged, model, 0.5, n)
        share = min(0.5, (1 + n) / (10 + n))
        expected = share * expected + (1 - share) * model.embedding.weight.detach()
        torch.testing.assert_close(averaged.embedding.weight, expected)
    assert averaged.head.weight is averaged.embedding.weight
    assert not averaged.embedding.weight.requires_grad


def test_buffers_are_copied():
    model = StandIn()
    averaged = averaged_copy(model)
    model.calls += 7
    average(averaged, model, 0.5, 1)
    assert averaged.calls == 7


def test_the_average_is_evaluated_and_saved_and_does_not_change_training(tmp_path):
    plain, with_ema = tmp_path / "plain", tmp_path / "ema"
    run(plain)
    result = run(with_ema, ema=0.9)
    found = weights(with_ema)
    assert same(weights(plain), {n: x for n, x in found.items() if not n.startswith("average.")})
    assert [x for x in losses(plain) if x[0] == "train"] == [x for x in losses(with_ema) if x[0] == "train"]
    averaged = {n.removeprefix("average."): x for n, x in found.items() if n.startswith("average.")}
    model = StandIn()
    model.load_state_dict(averaged | {"head.weight": averaged["embedding.weight"]})
    assert evaluate(model, Cycles(), config()) == result.last_val != losses(plain)[-1][2]


@pytest.mark.parametrize("steps", [1, 6])
def test_a_resumed_run_has_the_same_average(tmp_path, steps):
    run(tmp_path / "whole", ema=0.9, schedule="constant")
    run(tmp_path / "parts", ema=0.9, schedule="constant", steps=steps)
    run(tmp_path / "parts", ema=0.9, schedule="constant")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_weights_of_16_bits_are_not_averaged(tmp_path):
    with pytest.raises(ValueError, match=r"ema is set, but embedding\.weight is torch\.bfloat16"):
        run(tmp_path, model=StandIn().bfloat16(), ema=0.9)


def test_a_run_does_not_begin_to_average_half_way(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match=r"train\.ema was None and is now 0\.9"):
        run(tmp_path, ema=0.9)


def test_the_first_updates_of_a_run_forget_the_first_weights(tmp_path):
    """After n updates, the decay is (1 + n) / (10 + n)."""
    start, model = StandIn(dropout=0.0), StandIn(dropout=0.0)
    run(tmp_path, model=model, steps=1, ema=0.999)
    found = weights(tmp_path)["average.embedding.weight"]
    expected = start.embedding.weight.lerp(model.embedding.weight, 1 - 2 / 11)
    torch.testing.assert_close(found, expected.detach())


def test_weights_of_fp16_are_not_averaged_either(tmp_path):
    with pytest.raises(ValueError, match=r"ema is set, but embedding\.weight is torch\.float16"):
        run(tmp_path, model=StandIn().half(), ema=0.9)
