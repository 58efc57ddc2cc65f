import gzip
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unrolled.data.listops import END, FIRST_OPERATOR, WORDS, ListopsDataset, value_of


def parsed(ids: list[int]) -> tuple[int, int]:
    """Value and levels of an expression, by recursion."""
    if ids[0] < FIRST_OPERATOR:
        assert len(ids) == 1
        return ids[0], 1
    assert ids[-1] == END
    parts, open_ = [], 0
    for i in ids[1:-1]:
        if not open_:
            parts.append([])
        parts[-1].append(i)
        open_ += (i >= FIRST_OPERATOR) - 2 * (i == END)
    assert not open_
    values, levels = zip(*map(parsed, parts), strict=True)
    assert 2 <= len(values) <= 10
    ordered, n = sorted(values), len(values)
    value = {
        "[MIN": ordered[0],
        "[MAX": ordered[-1],
        "[MED": (ordered[(n - 1) // 2] + ordered[n // 2]) // 2,
        "[SM": sum(values) % 10,
    }[WORDS[ids[0]]]
    return value, 1 + max(levels)


def rows(batch) -> list[list[int]]:
    return [row[~hidden].tolist() for row, hidden in zip(batch.inputs, batch.key_padding_mask, strict=True)]


def test_batches_of_validation_have_no_padding_that_all_rows_share():
    data = ListopsDataset(shortest=1, length=60, val_size=30)
    for size in (1, 4):
        for batch in data.eval_batches(size):
            assert not batch.key_padding_mask.all(0).any()


@given(shortest=st.integers(1, 40), depth=st.integers(3, 10), seed=st.integers(0, 99))
def test_labels_are_the_values(shortest, depth, seed):
    data = ListopsDataset(shortest=shortest, length=shortest + 60, depth=depth, val_size=1)
    batch = data.batch("train", step=0, batch_size=5, seed=seed)
    for ids, label in zip(rows(batch), batch.targets.tolist(), strict=True):
        value, levels = parsed(ids)
        assert value == label == value_of(ids)
        assert levels <= depth
        assert shortest <= len(ids) <= shortest + 60
    assert batch.inputs.shape[1] == max(map(len, rows(batch)))


def test_the_defaults_are_those_of_the_long_range_arena():
    data = ListopsDataset(val_size=300)
    found = [row for batch in data.eval_batches(64) for row in rows(batch)]
    lengths = sorted(map(len, found))
    assert 500 <= lengths[0] < 700 < 1_700 < lengths[-1] <= 2_000
    assert 7 < max(parsed(row)[1] for row in found) <= 10
    first = [row[0] for row in found]
    assert all(40 < first.count(i) < 115 for i in range(FIRST_OPERATOR, END))  # 75 each, 6.5 at one sigma
    labels = Counter(batch for row in data.eval_batches(64) for batch in row.targets.tolist())
    assert sorted(labels) == list(range(10))


def test_all_of_a_small_range():
    data = ListopsDataset(shortest=1, length=1, val_size=100)
    (batch,) = data.eval_batches(100)
    assert torch.equal(batch.inputs[:, 0], batch.targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arguments": 1}, "arguments is 1, but must be an integer of at least 2"),
        ({"shortest": 9, "length": 8}, "shortest is 9, but must be at most length = 8"),
        ({"shortest": 2, "length": 3}, "none is in between: choose a wider range"),
        ({"shortest": 2, "length": 9, "depth": 1}, "expressions of depth 1 with 10 arguments none"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ListopsDataset(**options)


@pytest.mark.parametrize("real_data", ["listops"], indirect=True)
def test_the_values_of_the_published_expressions(real_data):
    wrong = 0
    with gzip.open(Path(real_data, "listops", "test_d20s.tsv.gz"), "rt") as file:
        lines = [line.rstrip("\n").split("\t") for line in file]
    for label, expression in lines:  # in binary form, whose parentheses say nothing more
        ids = [WORDS.index(word) for word in expression.split() if word not in "()"]
        wrong += value_of(ids) != int(label)
    assert (len(lines), wrong) == (10_000, 0)


@pytest.mark.parametrize("most", [2, 4])
def test_an_operator_has_up_to_the_given_number_of_arguments(most):
    data = ListopsDataset(shortest=1, length=60, depth=2, arguments=most, val_size=500)
    found = {len(row) - 2 for batch in data.eval_batches(100) for row in rows(batch) if len(row) > 1}
    assert found == set(range(2, most + 1))
