"""The tasks on tokens that ask for what was read before: each is solved here by a reader of the inputs alone."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unrolled import data
from unrolled.contract import IGNORED, Batch
from unrolled.data.induction import InductionDataset
from unrolled.data.mqar import MqarDataset
from unrolled.data.passkey import PasskeyDataset
from unrolled.data.selective_copy import SelectiveCopyDataset

quick = settings(max_examples=25)


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return list(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))


@quick
@given(
    n_pairs=st.integers(1, 6),
    spare=st.integers(0, 9),
    ids=st.integers(0, 9),
    power=st.sampled_from([0.01, 0.5, 1.0]),
    step=st.integers(0, 9),
)
def test_mqar_asks_once_for_the_value_of_each_key(n_pairs, spare, ids, power, step):
    length, vocab_size = 4 * n_pairs + spare, 2 * n_pairs + ids
    dataset = MqarDataset(length, n_pairs, vocab_size, power, val_size=1)
    for inputs, targets in rows(dataset.batch("train", step=step, batch_size=8, seed=0)):
        first = inputs[: 2 * n_pairs]
        keys, values = first[::2], first[1::2]
        assert len(set(keys)) == len(set(values)) == n_pairs
        assert 0 <= min(keys) <= max(keys) < vocab_size // 2 <= min(values) <= max(values) < vocab_size
        # A key is found nowhere but in its pair and where it is asked for, so each has one answer.
        value_of, asked = dict(zip(keys, values, strict=True)), inputs[2 * n_pairs :]
        assert sorted(x for x in asked if x in value_of) == sorted(keys)
        assert all(inputs.index(key, 2 * n_pairs) % 2 == 0 for key in keys)
        assert targets == [IGNORED] * len(first) + [value_of.get(x, IGNORED) for x in asked]
        assert all(0 <= x < vocab_size for x in inputs)


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_mqar_asks_at_the_distances_of_the_published_generator(power):
    count, n_pairs, space = 6_000, 3, 8
    dataset = MqarDataset(2 * n_pairs + 2 * space, n_pairs, 64, power, val_size=1)
    inputs, targets, *_ = dataset.batch("train", step=0, batch_size=count, seed=0)
    asked = (targets[:, 2 * n_pairs :] != IGNORED)[:, ::2]
    # The generator of Arora et al. draws the places of a sequence so.
    p = power * np.arange(1, space + 1) ** (power - 1)
    rng = np.random.default_rng(1)
    drawn = [rng.choice(space, replace=False, p=p / p.sum(), size=n_pairs) for _ in range(count)]
    expected = np.bincount(np.ravel(drawn), minlength=space) / count
    error = 4 * np.sqrt(2 * expected * (1 - expected) / count)
    assert (np.abs(asked.double().mean(0).numpy() - expected) < error).all()
    # The first key is asked for at the first place drawn, so it tends to be near.
    place = (inputs[:, 2 * n_pairs :: 2] == inputs[:, :1]).double().argmax(1)
    firsts = np.array([places[0] for places in drawn])
    assert abs(place.double().mean() - firsts.mean()) < 4 * firsts.std() * (2 / count) ** 0.5


@quick
@given(
    n_tokens=st.integers(1, 6),
    noise=st.integers(0, 20),
    n_symbols=st.integers(1, 5),
    step=st.integers(0, 9),
)
def test_selective_copy_asks_for_the_symbols_in_order(n_tokens, noise, n_symbols, step):
    dataset = SelectiveCopyDataset(2 * n_tokens + noise, n_tokens, n_symbols, val_size=1)
    for inputs, targets in rows(dataset.batch("train", step=step, batch_size=8, seed=0)):
        read = n_tokens + noise
        symbols = [x for x in inputs if x < n_symbols]
        assert len(symbols) == n_tokens
        assert targets == [IGNORED] * read + symbols
        assert inputs[read:] == [n_symbols + 1] * n_tokens
        assert Counter(inputs[:read])[n_symbols] == noise


def test_selective_copy_puts_the_symbols_at_every_place_equally_often():
    inputs = (
        SelectiveCopyDataset(12, 3, 2, val_size=1).batch("train", step=0, batch_size=9_000, seed=0).inputs
    )
    share = (inputs[:, :9] < 2).double().mean(0)
    torch.testing.assert_close(share, torch.full((9,), 1 / 3, dtype=torch.float64), atol=0.02, rtol=0)


@quick
@given(length=st.integers(3, 40), n_symbols=st.integers(1, 9), step=st.integers(0, 9))
def test_induction_asks_for_what_followed_the_special_token(length, n_symbols, step):
    dataset = InductionDataset(length, n_symbols, val_size=1)
    for inputs, targets in rows(dataset.batch("train", step=step, batch_size=8, seed=0)):
        first = inputs.index(n_symbols)
        assert Counter(inputs)[n_symbols] == 2
        assert inputs[-1] == n_symbols
        assert targets == [IGNORED] * (length - 1) + [inputs[first + 1]]
        assert max(targets) < n_symbols


def test_induction_hides_the_special_token_at_every_place_equally_often():
    inputs = InductionDataset(8, 3, val_size=1).batch("train", step=0, batch_size=6_000, seed=0).inputs
    places = torch.bincount((inputs == 3).int().argmax(1), minlength=8) / 6_000
    torch.testing.assert_close(places[:6], torch.full((6,), 1 / 6), atol=0.02, rtol=0)
    assert not places[6:].any()


@quick
@given(
    key_length=st.integers(1, 5),
    filler=st.integers(0, 30),
    n_filler=st.integers(1, 7),
    depth=st.none() | st.floats(0, 1),
    step=st.integers(0, 9),
)
@example(key_length=1, filler=1, n_filler=1, depth=0.9, step=0)  # which is rounded
def test_a_passkey_is_said_in_the_filler_and_asked_for_at_the_end(key_length, filler, n_filler, depth, step):
    length = 2 * key_length + 1 + filler
    dataset = PasskeyDataset(length, key_length, 4, n_filler, depth, val_size=1)
    for inputs, targets in rows(dataset.batch("train", step=step, batch_size=8, seed=0)):
        begin = inputs.index(4)
        key = inputs[begin + 1 : begin + 1 + key_length]
        assert max(key) < 4
        assert inputs[-key_length:] == [4, *key[:-1]]
        assert targets == [IGNORED] * (length - key_length) + key
        others = inputs[:begin] + inputs[begin + 1 + key_length : -key_length]
        assert others == [5 + i % n_filler for i in range(filler)]
        assert depth is None or abs(begin - depth * filler) <= 0.5


def test_a_passkey_is_hidden_at_every_depth_equally_often():
    dataset = PasskeyDataset(length=8, key_length=1, val_size=1)  # 5 tokens of filler
    places = (dataset.batch("train", step=0, batch_size=6_000, seed=0).inputs == 10).int().argmax(1)
    torch.testing.assert_close(torch.bincount(places) / 6_000, torch.full((6,), 1 / 6), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mqar", {"length": 64, "n_pairs": 4, "vocab_size": 8_192}),
        ("selective_copy", {"n_tokens": 16, "vocab_size": 16}),
        ("induction", {"length": 256, "vocab_size": 16}),
        ("passkey", {"key_length": 5, "vocab_size": 10 + 1 + 24}),
    ],
)
def test_the_defaults_are_the_sizes_of_the_papers(name, sizes):
    dataset = data.load(name, val_size=1)
    assert {size: getattr(dataset, size) for size in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mqar", {"length": 15}, "length is 15, but must be at least 4 n_pairs = 16"),
        ("mqar", {"vocab_size": 7}, "vocab_size is 7, but must be at least 2 n_pairs = 8"),
        ("mqar", {"n_pairs": 0}, "n_pairs is 0, but must be an integer of at least 1"),
        ("mqar", {"power": 0.0}, "power is 0.0, but must be a number in"),
        ("mqar", {"power": 1.5}, "power is 1.5, but must be a number in"),
        ("selective_copy", {"length": 31}, "length is 31, but must be at least 2 n_tokens = 32"),
        ("selective_copy", {"n_symbols": 0}, "n_symbols is 0, but must be an integer of at least 1"),
        ("induction", {"length": 2}, "length is 2, but must be an integer of at least 3"),
        ("passkey", {"length": 10}, "length is 10, but must be at least 2 key_length"),
        ("passkey", {"depth": 1.5}, "depth is 1.5, but must be a number from 0 to 1, or None"),
        ("passkey", {"val_size": True}, "val_size is True, but must be an integer"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        data.load(name, **options)
