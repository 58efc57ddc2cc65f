"""The tasks on bits and numbers: what an example is, and what all of them promise."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import data
from unrolled.cli._overlap import intersection_over_union
from unrolled.contract import IGNORED
from unrolled.data.adding import AddingDataset
from unrolled.data.associative_recall import AssociativeRecallDataset
from unrolled.data.copy_bits import CopyBitsDataset
from unrolled.data.repeat_copy import RepeatCopyDataset
from unrolled.models import Segmenter, SegmenterConfig
from unrolled.training import TrainConfig, evaluate

BITS = ["associative_recall", "copy_bits", "repeat_copy"]


@settings(max_examples=20)
@given(n=st.integers(1, 9), n_bits=st.integers(1, 9), step=st.integers(0, 5))
def test_copy_repeats_its_input(n, n_bits, step):
    dataset = CopyBitsDataset(n_bits, val_size=1, min_length=n, max_length=n)
    inputs, targets, *_ = dataset.batch("train", step=step, batch_size=4, seed=0)
    assert inputs.shape == (4, dataset.length, n_bits + 2) == (4, 2 * n + 2, dataset.input_size)
    said = inputs[:, 1 : n + 1, :n_bits]
    assert torch.equal(targets[:, n + 2 :], said)
    assert (targets[:, : n + 2] == IGNORED).all()
    assert not inputs[:, n + 2 :].any()
    assert inputs[:, :, n_bits].nonzero()[:, 1].tolist() == [0] * 4
    assert inputs[:, :, n_bits + 1].nonzero()[:, 1].tolist() == [n + 1] * 4


@settings(max_examples=20)
@given(n=st.integers(1, 5), repeats=st.integers(1, 12))
def test_repeat_copy_repeats_its_input_so_many_times_and_then_ends(n, repeats):
    sizes = {"min_length": n, "max_length": n, "min_repeats": repeats, "max_repeats": repeats}
    dataset = RepeatCopyDataset(4, val_size=1, **sizes)
    inputs, targets, *_ = dataset.batch("train", step=0, batch_size=3, seed=0)
    assert inputs.shape == (3, dataset.length, 6)
    assert targets.shape == (3, dataset.length, 5) == (3, dataset.length, dataset.output_size)
    said = inputs[:, 1 : n + 1, :4]
    assert torch.equal(targets[:, n + 2 : -1, :4], torch.cat([said] * repeats, 1))
    assert not targets[:, n + 2 : -1, 4].any()
    assert torch.equal(targets[:, -1], torch.tensor([[0.0, 0, 0, 0, 1]] * 3))
    assert (targets[:, : n + 2] == IGNORED).all()
    told = inputs[:, n + 1, 5] * (33 / 4) ** 0.5 + 5.5
    torch.testing.assert_close(told, torch.full((3,), float(repeats)))


@settings(max_examples=20)
@given(n=st.integers(2, 6), length=st.integers(1, 4), step=st.integers(0, 5))
def test_associative_recall_asks_for_the_item_after_one(n, length, step):
    dataset = AssociativeRecallDataset(8, 1, length, n, n)
    inputs, targets, *_ = dataset.batch("train", step=step, batch_size=4, seed=0)
    assert inputs.shape[1] == dataset.length
    for row, target in zip(inputs, targets, strict=True):
        starts = row[:, 8].nonzero().flatten().tolist()
        items = [row[start + 1 : start + 1 + length, :8] for start in starts]
        first, second = row[:, 9].nonzero().flatten().tolist()
        asked = row[first + 1 : second, :8]
        after = [b for a, b in pairwise(items) if torch.equal(a, asked)]
        assert len(items) == n
        assert any(torch.equal(target[-length:], b) for b in after)
        assert (target[:-length] == IGNORED).all()
        assert not row[second + 1 :].any()


@settings(max_examples=20)
@given(length=st.integers(2, 30))
def test_adding_marks_a_number_of_each_half(length):
    inputs, targets, *_ = AddingDataset(length, 1).batch("train", step=0, batch_size=20, seed=0)
    assert inputs.shape == (20, length, 2)
    marks = inputs[..., 1]
    assert (marks[:, : length // 2].sum(1) == 1).all()
    assert (marks[:, length // 2 :].sum(1) == 1).all()
    torch.testing.assert_close(targets, (inputs[..., 0] * marks).sum(1))
    assert inputs.min() >= 0
    assert inputs.max() <= 1


def test_always_to_say_1_has_the_error_that_adding_states():
    (batch,) = AddingDataset(10, 20_000).eval_batches(20_000)
    assert (batch.targets - 1).square().mean().item() == pytest.approx(1 / 6, rel=0.03)


def test_lengths_are_drawn_uniformly_and_all_rows_of_a_batch_have_one():
    dataset = CopyBitsDataset(val_size=1)
    steps = [dataset.batch("train", step=step, batch_size=2, seed=0).inputs.shape[1] for step in range(300)]
    assert set(steps) == {2 * n + 2 for n in range(1, 21)}
    assert sum(steps) / 300 == pytest.approx(23, rel=0.1)


@pytest.fixture(params=[*BITS, "adding"])
def dataset(request):
    return data.load(request.param, val_size=7)


def test_every_task_keeps_the_protocol(dataset):
    assert dataset.task == ("numbers" if isinstance(dataset, AddingDataset) else "bits")
    for split in ("train", "val"):
        inputs, targets, *_ = dataset.batch(split, step=3, batch_size=5, seed=0)
        assert inputs.dtype == targets.dtype == torch.float32
        assert inputs.shape == (5, inputs.shape[1], dataset.input_size)
        if dataset.task == "bits":
            assert targets.shape == (5, inputs.shape[1], dataset.output_size)
            assert set(targets.unique().tolist()) == {IGNORED, 0, 1}
    assert dataset.epoch_size("val") == 7
    assert dataset.epoch_size("train") > 7


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("copy_bits", {"n_bits": 0}, "n_bits is 0, but must be an integer of at least 1"),
        ("copy_bits", {"val_size": True}, "val_size is True, but must be an integer"),
        ("copy_bits", {"min_length": 21}, "min_length is 21, but must be at most max_length = 20"),
        ("repeat_copy", {"max_repeats": 0}, "max_repeats is 0, but must be an integer of at least 1"),
        ("associative_recall", {"min_items": 1}, "min_items is 1, but must be an integer of at least 2"),
        ("associative_recall", {"item_length": 0}, "item_length is 0, but must be"),
        ("adding", {"length": 1}, "length is 1, but must be an integer of at least 2"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        data.load(name, **options)


@pytest.mark.parametrize("name", BITS)
def test_an_example_is_evaluated_as_if_alone(name):
    dataset = data.load(name, val_size=12)
    sizes = {"input_size": dataset.input_size, "output_size": dataset.output_size, "positions": "sinusoidal"}
    torch.manual_seed(0)
    model = Segmenter(SegmenterConfig(**sizes, d_model=16, n_layers=1, n_heads=2, attention="softmax"))
    losses = [evaluate(model, dataset, TrainConfig(batch_size=size)) for size in (1, 12)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (batch,) = dataset.eval_batches(12)
    assert batch.key_padding_mask.any()
    assert (batch.targets[batch.key_padding_mask] == IGNORED).all()
    overlaps = [intersection_over_union(model, dataset, size) for size in (1, 12)]
    assert overlaps[0] == overlaps[1]


def test_the_lists_of_a_batch_are_asked_for_different_items():
    dataset = data.load("associative_recall", min_items=6, max_items=6, val_size=1)
    inputs = dataset.batch("train", step=0, batch_size=60, seed=0).inputs
    items = inputs[:, :24].reshape(60, 6, 4, 8)[:, :, 1:, :6]
    same = (items == inputs[:, None, 25:28, :6]).flatten(2).all(-1)
    assert same.any(0).tolist() == [True] * 5 + [False]  # all but the last, which none follows
