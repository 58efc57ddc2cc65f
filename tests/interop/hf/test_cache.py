"""The cache holds states as values, and selects their rows as generation does those of a batch."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from unrolled.contract import UnsupportedError
from unrolled.interop.hf.cache import StateCache, StateLayer
from unrolled.models import DecoderState
from unrolled.ops.linear import LinearState


def make_state(batch_size=3):
    rows = torch.arange(batch_size)
    kv = rows.view(-1, 1, 1, 1) + torch.zeros(batch_size, 2, 4, 5)
    return DecoderState(rows, (LinearState(kv, kv[..., 0]),))


def rows_of(layer):
    state = layer.state
    assert torch.equal(state.layers[0].kv[:, 1, 2, 3].long(), state.position)
    return state.position.tolist()


def test_a_cache_has_one_empty_state_by_default():
    cache = StateCache()
    assert len(cache) == 1
    assert cache.layers[0].state is None
    assert cache.get_seq_length() == cache.nbytes() == 0
    assert cache.batch_size == -1
    assert cache.get_max_length() == -1
    assert not cache.is_initialized
    assert not cache.is_croppable


def test_putting_a_state_counts_the_positions_read():
    cache = StateCache()
    cache.layers[0].put(make_state(), 7)
    cache.layers[0].put(make_state(), 1)
    assert cache.get_seq_length() == 8
    assert cache.layers[0].is_initialized
    assert cache.get_mask_sizes(5, 0) == (13, 0)
    assert cache.batch_size == 3
    assert cache.nbytes() == 3 * 8 + 3 * 2 * 4 * 5 * 4 + 3 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("method", "argument", "expected"),
    [
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_rows_follow_the_batch(method, argument, expected):
    given = make_state()
    cache = StateCache.of(given, 4)
    getattr(cache, method)(argument)
    assert rows_of(cache.layers[0]) == expected
    assert given.position.tolist() == [0, 1, 2]
    assert cache.get_seq_length() == 4
    empty = StateCache()
    getattr(empty, method)(argument)
    assert empty.layers[0].state is None


def test_reset_forgets():
    cache = StateCache.of(make_state(), 4)
    cache.reset()
    assert cache.layers[0].state is None
    assert not cache.layers[0].is_initialized
    assert cache.get_seq_length() == 0


def test_states_and_keys_in_one_cache():
    cache = StateCache([StateLayer(make_state(2), 3), DynamicLayer()])
    keys = torch.zeros(2, 4, 3, 8)
    cache.update(keys, keys, 1)
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == 3
    assert cache.nbytes() == cache.layers[0].nbytes() + 2 * keys.numel() * 4
    cache.reorder_cache(torch.tensor([1, 1]))
    assert rows_of(cache.layers[0]) == [1, 1]


def test_what_a_state_cannot_do_is_refused():
    cache = StateCache.of(make_state(), 4)
    cache.crop(0)
    with pytest.raises(
        UnsupportedError, match="a state cannot go back by 2 tokens: save the state before those tokens"
    ):
        cache.crop(-2)  # as transformers asks for it
    keys = torch.zeros(3, 2, 1, 4)
    with pytest.raises(UnsupportedError, match="holds a state, not keys and values"):
        cache.update(keys, keys, 0)
    with pytest.raises(UnsupportedError, match="holds a state, not keys and values"):
        cache.layers[0].lazy_initialization(keys, keys)
