import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unrolled.contract import IGNORED
from unrolled.data.copy import CopyDataset


@given(length=st.integers(2, 40), n_symbols=st.integers(1, 12), step=st.integers(0, 10))
def test_an_example_is_a_word_a_separator_and_the_word_again(length, n_symbols, step):
    dataset = CopyDataset(length=length, n_symbols=n_symbols, val_size=1)
    batch = dataset.batch("train", step=step, batch_size=8, seed=0)
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        n = inputs.index(n_symbols)
        word = inputs[:n]
        assert length // 2 <= 2 * n <= length
        assert max(word) < n_symbols
        end = length - 2 * n
        assert inputs == [*word, n_symbols, *word, *[n_symbols] * end][:length]
        assert targets == [IGNORED] * n + word + [IGNORED] * end


def test_the_default_is_the_papers_task():
    dataset = CopyDataset()
    assert (dataset.length, dataset.vocab_size, dataset.start_token) == (128, 11, False)
    inputs, targets, *_ = dataset.batch("train", step=0, batch_size=2_000, seed=0)
    sizes = (targets != IGNORED).sum(1)
    assert set(sizes.tolist()) == set(range(32, 65))
    assert set(inputs.unique().tolist()) == set(range(11))


def test_training_never_repeats_and_the_validation_set_never_changes():
    one, two = CopyDataset(val_size=50), CopyDataset(val_size=50)
    (val,) = one.eval_batches(50)
    assert torch.equal(val.inputs, next(two.eval_batches(50)).inputs)
    words = {tuple(row) for row in val.inputs.tolist()}
    for seed in range(2):
        for step in range(3):
            words |= {
                tuple(row) for row in one.batch("train", step=step, batch_size=50, seed=seed).inputs.tolist()
            }
    assert len(words) == 7 * 50


def test_validation_batches_go_through_the_set_and_begin_again():
    dataset = CopyDataset(val_size=5)
    (val,) = dataset.eval_batches(5)
    rows = torch.cat([dataset.batch("val", step=step, batch_size=3, seed=9).inputs for step in range(3)])
    assert torch.equal(rows, val.inputs[[0, 1, 2, 3, 4, 0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length is 1, but must be an integer of at least 2"),
        ({"n_symbols": 0}, "n_symbols is 0, but must be an integer of at least 1"),
        ({"val_size": True}, "val_size is True, but must be an integer of at least 1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CopyDataset(**options)
