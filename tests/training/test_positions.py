"""Loss and accuracy by position: against a loop over single windows and targets, in fp64."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from corpora import story, write_corpus
from torch.nn.functional import cross_entropy

from unrolled import data, models
from unrolled.contract import IGNORED, Batch, UnsupportedError
from unrolled.data import BaseDataset
from unrolled.training import TrainConfig, evaluate, evaluate_positions
from unrolled.training.positions import _mean

CONFIG = TrainConfig(batch_size=3, eval_batches=1)  # of which the batches are ignored
ATTENTION = {"n_layers": 1, "n_heads": 2, "max_length": 12, "dropout": 0.1}
FIELDS = {"decoder": ATTENTION, "perceiver_ar": {**ATTENTION, "n_latents": 5}, "recurrent_lm": {}}


def small(dataset: BaseDataset, kind: str = "decoder", **fields: object) -> torch.nn.Module:
    torch.manual_seed(0)
    made = models.KINDS[kind]
    model = made(made.config_type(vocab_size=dataset.vocab_size, d_model=16, **fields)).double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def by_hand(model: torch.nn.Module, dataset: BaseDataset, start: int, stop: int) -> list[torch.Tensor]:
    """The losses and hits [2,c] of the c targets of each window that has any at these positions."""
    windows = []
    with torch.no_grad():
        for inputs, targets, *_ in dataset.eval_batches(1):
            logits = model.eval()(inputs)[0]
            targets = targets[0, -len(logits) :]
            shift = inputs.shape[1] - len(logits)
            places = [t for t in range(len(logits)) if start <= t + shift < stop and targets[t] != IGNORED]
            if places:
                losses = [cross_entropy(logits[t], targets[t]) for t in places]
                hits = [(logits[t].argmax() == targets[t]).double() for t in places]
                windows.append(torch.stack([torch.stack(losses), torch.stack(hits)]))
    return windows


@pytest.mark.parametrize("kind", FIELDS)
def test_it_is_the_mean_over_the_targets_of_the_whole_split(kind):
    dataset = data.load("copy", length=12, n_symbols=3, val_size=10)
    model = small(dataset, kind, **FIELDS[kind])
    ranges = [(0, 12), (0, 4), (4, 7), (7, 8), (8, 12)]
    scores = {
        (score.start, score.stop): score for score in evaluate_positions(model, dataset, CONFIG, ranges)
    }
    for start, stop in ranges:
        windows = by_hand(model, dataset, start, stop)
        if not windows:
            assert (start, stop) not in scores
            continue
        score, every = scores[start, stop], torch.cat(windows, dim=1)
        assert (score.windows, score.targets) == (len(windows), every.shape[1])
        assert score.loss == pytest.approx(every[0].mean().item(), rel=1e-12)
        assert score.accuracy == pytest.approx(every[1].mean().item(), rel=1e-12)
    assert ((0, 4) in scores) == (kind != "perceiver_ar")  # which predicts the last 5 only
    if kind != "perceiver_ar":
        assert scores[0, 12].loss == pytest.approx(evaluate(model, dataset, TrainConfig()), rel=1e-12)


@pytest.mark.parametrize("kind", ["decoder", "recurrent_lm"])
def test_segments_are_read_one_by_one_and_change_nothing(kind):
    dataset = data.load("copy", length=12, n_symbols=3, val_size=10)
    assert in_segments(small(dataset, kind, **FIELDS[kind]), dataset, [(0, 12), (3, 9)], segment=5) == 5


def test_packed_sequences_are_read_in_segments_too(tmp_path):
    folder = write_corpus(tmp_path / "corpus", [story(i, words=3 + i % 20) for i in range(60)])
    dataset = data.load("tokens", path=str(folder), length=32, documents="separate")
    model = small(dataset, **ATTENTION | {"max_length": 32})
    assert in_segments(model, dataset, [(0, 32), (8, 20)], segment=8) == 8


def padded(kind: str, beneath: int = 0) -> tuple[torch.nn.Module, SimpleNamespace]:
    """A model, and one batch whose first row begins with padding, where there are these inputs and targets."""
    model = small(data.load("copy", length=12, n_symbols=3, val_size=10), kind, **FIELDS[kind])
    ids = torch.randint(1, 3, (2, 9), generator=torch.Generator().manual_seed(0))
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[0, :3] = True
    inputs, targets = (x.masked_fill(padding, beneath) for x in (ids[:, :-1], ids[:, 1:]))
    return model, SimpleNamespace(eval_batches=lambda size: iter([Batch(inputs, targets, padding)]))


@pytest.mark.parametrize("segment", [None, 3])
@pytest.mark.parametrize("kind", ["decoder", "recurrent_lm"])
def test_padding_is_neither_read_nor_predicted(kind, segment):
    config = replace(CONFIG, segment=segment)
    (score,) = evaluate_positions(*padded(kind), config, [(0, 8)])
    assert (score.windows, score.targets) == (2, 13)
    assert score.loss == pytest.approx(evaluate(*padded(kind), TrainConfig()), rel=1e-12)
    assert score.loss == pytest.approx(evaluate(*padded(kind), replace(TrainConfig(), segment=3)), rel=1e-12)
    assert evaluate_positions(*padded(kind, beneath=1), config, [(0, 8)]) == [score]


def test_the_places_of_a_model_that_predicts_at_the_end_are_not_known_with_padding():
    with pytest.raises(UnsupportedError, match="PerceiverAR predicts the last valid tokens only"):
        evaluate_positions(*padded("perceiver_ar"), CONFIG, [(0, 8)])


def in_segments(
    model: torch.nn.Module, dataset: BaseDataset, ranges: list[tuple[int, int]], segment: int
) -> int:
    """Compare the scores with those without segments; return how many tokens were read at most at a time."""
    expected = evaluate_positions(model, dataset, CONFIG, ranges)
    read = []
    model.embedding.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape[1]))
    found = evaluate_positions(model, dataset, replace(CONFIG, segment=segment), ranges)
    for a, b in zip(found, expected, strict=True):
        assert (a.windows, a.targets, a.correct) == (b.windows, b.targets, b.correct)
        assert (a.loss, a.loss_error) == pytest.approx((b.loss, b.loss_error), rel=1e-10)
    return max(read)


def test_with_as_many_targets_in_each_window_the_error_is_that_of_the_mean_of_windows():
    dataset = data.load("selective_copy", length=12, n_tokens=4, n_symbols=2, val_size=9)
    model = small(dataset, **ATTENTION)
    (score,) = evaluate_positions(model, dataset, CONFIG, [(0, 12)])
    means = torch.stack([window.mean(1) for window in by_hand(model, dataset, 0, 12)])
    loss, accuracy = means.std(0) / 9**0.5
    assert score.loss_error == pytest.approx(loss.item(), rel=1e-10)
    assert score.accuracy_error == pytest.approx(accuracy.item(), rel=1e-10)


def test_the_standard_error_is_the_deviation_over_new_draws_of_the_windows():
    generator, n, draws = torch.Generator().manual_seed(0), 40, 3_000
    counts = torch.randint(1, 10, (draws, n), generator=generator).double()
    level = torch.randn(draws, n, generator=generator, dtype=torch.float64)  # shared by a window's targets
    sums = counts * (1 + level)
    found = [_mean(*window) for window in zip(sums, counts, strict=True)]
    means, errors = torch.tensor(found, dtype=torch.float64).T
    assert errors.square().mean().sqrt().item() == pytest.approx(means.std().item(), rel=0.08)


def test_one_window_has_no_standard_error():
    dataset = data.load("induction", length=6, val_size=1)
    (score,) = evaluate_positions(small(dataset, **ATTENTION), dataset, CONFIG, [(0, 6)])
    assert (score.windows, score.targets, score.loss_error, score.accuracy_error) == (1, 1, None, None)


def test_modes_and_the_random_state_are_restored():
    dataset = data.load("induction", length=6, val_size=4)
    model = small(dataset, **ATTENTION).train()
    model.stack.layers[0].eval()  # as a frozen layer
    before, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    first = evaluate_positions(model, dataset, CONFIG, [(0, 6)])
    evaluate(model, dataset, CONFIG)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert evaluate_positions(model, dataset, CONFIG, [(0, 6)]) == first  # without dropout


def test_a_split_without_targets_is_refused():
    class Nothing:
        def eval_batches(self, batch_size: int) -> Iterator[Batch]:
            yield Batch(torch.zeros(2, 5, dtype=torch.long), torch.full((2, 5), IGNORED))

    dataset = data.load("induction", length=6, val_size=4)
    with pytest.raises(ValueError, match="no target"):
        evaluate_positions(small(dataset, **ATTENTION), Nothing(), CONFIG, [(0, 5)])
    with pytest.raises(ValueError, match="no target"):
        evaluate_positions(small(dataset, **ATTENTION), dataset, CONFIG, [(0, 2)])


def test_without_ranges_or_validation_data_it_says_so():
    dataset = data.load("copy", length=12, n_symbols=3, val_size=10)
    model = small(dataset, **ATTENTION)
    for wrong, message in {
        (11, 6): "stop is 6, but must be at least 12",
        (-2, 12): "start is -2, but must be at least 0",
        (0, 1.5): "stop is 1.5, but must be an integer",
    }.items():
        with pytest.raises(ValueError, match=message):
            evaluate_positions(torch.nn.Identity(), None, CONFIG, [(0, 6), wrong])
    with pytest.raises(ValueError, match="model is a Identity without parameters"):
        evaluate_positions(torch.nn.Identity(), None, CONFIG, [(0, 6)])
    with pytest.raises(ValueError, match="ranges is empty, but must have at least one range"):
        evaluate_positions(model, dataset, CONFIG, [])
    empty = SimpleNamespace(eval_batches=lambda batch_size: iter(()))
    with pytest.raises(ValueError, match="the validation split is empty"):
        evaluate_positions(model, empty, CONFIG, [(0, 4)])


@pytest.mark.parametrize("bf16", [True, False])
def test_the_precision_is_that_of_the_config(bf16):
    dataset = data.load("copy", length=12, n_symbols=3, val_size=4)
    model, found = small(dataset, **ATTENTION).float(), set()
    model.embedding.register_forward_hook(lambda *_: found.add(torch.is_autocast_enabled("cpu")))
    evaluate_positions(model, dataset, replace(CONFIG, bf16=bf16), [(0, 12)])
    assert found == {bf16}
