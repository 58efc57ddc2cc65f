"""Orders that are computed and never stored: of windows, of sources, and of rows that read on."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unrolled.data._epochs import epoch_rows_by_length
from unrolled.data._mixture import BLOCK, drawn_sources
from unrolled.data._permutation import permuted
from unrolled.data._windows import consecutive, shifted, shuffled

KEY = st.integers(0, 2**40)


@given(size=st.integers(1, 3_000), seed=KEY, epoch=st.integers(0, 99))
def test_every_thing_has_one_place(size: int, seed: int, epoch: int) -> None:
    found = permuted(np.arange(size), size, seed, epoch)
    assert sorted(found.tolist()) == list(range(size))
    one_by_one = [int(permuted(np.array([place]), size, seed, epoch)[0]) for place in range(min(size, 5))]
    assert found[:5].tolist() == one_by_one


@given(size=st.integers(2**33, 2**62), seed=KEY)
def test_places_of_huge_orders_are_found_without_the_others(size: int, seed: int) -> None:
    places = np.array([0, 1, 2, size // 2, size - 1])
    found = permuted(places, size, seed)
    assert len(set(found.tolist())) == len(places)
    assert found.min() >= 0
    assert found.max() < size


def test_orders_of_different_keys_have_nothing_in_common() -> None:
    size, keys = 1_000, [(0, 0), (0, 1), (1, 0), (1, 1)]
    orders = [permuted(np.arange(size), size, *key) for key in keys]
    for i, one in enumerate(orders):
        assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 0.15  # 4.7 standard deviations
        for other in orders[:i]:
            assert (one == other).sum() < 10  # 1 is expected


def test_everything_is_equally_often_first() -> None:
    firsts = [int(permuted(np.array([0]), 5, seed)[0]) for seed in range(2_000)]
    assert np.bincount(firsts, minlength=5) == pytest.approx([400] * 5, abs=90)  # 5 standard deviations


@given(size=st.integers(1, 60), batch_size=st.integers(1, 40), seed=KEY)
def test_an_epoch_has_every_window_once(size: int, batch_size: int, seed: int) -> None:
    steps = -(-3 * size // batch_size)
    found = np.concatenate(
        [shuffled(size, np.arange(s * batch_size, (s + 1) * batch_size), seed) for s in range(steps)]
    )
    for epoch in range(3):
        assert sorted(found[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(length=st.integers(1, 40), more=st.integers(0, 500), seed=KEY)
def test_the_windows_of_an_epoch_follow_one_another(length: int, more: int, seed: int) -> None:
    size = length + more
    count = max(1, size // length - 1)
    for epoch in range(3):
        places = np.arange(epoch * count, (epoch + 1) * count)
        found = shifted(size, length, places, seed)
        starts = np.sort(found)
        assert (np.diff(starts) == length).all()
        assert starts[0] >= 0
        assert starts[-1] + length <= size
        assert size - count * length < 2 * length
        one_by_one = [int(shifted(size, length, places[i : i + 1], seed)[0]) for i in range(min(count, 5))]
        assert found[:5].tolist() == one_by_one


def test_epochs_begin_at_every_offset_equally_often() -> None:
    first = [int(shifted(9, 4, np.array([epoch]), seed=0)[0]) for epoch in range(3_000)]
    assert np.bincount(first, minlength=6) == pytest.approx([500] * 6, abs=103)  # 5 standard deviations


@given(size=st.integers(1, 60), batch_size=st.integers(1, 20), seed=KEY)
def test_rows_that_read_on_read_the_next_window(size: int, batch_size: int, seed: int) -> None:
    if size < batch_size:
        with pytest.raises(ValueError, match=f"batch_size is {batch_size}, but must be at most {size} with"):
            consecutive(size, step=0, batch_size=batch_size, seed=seed)
        return
    steps = size // batch_size
    batches = [consecutive(size, step=s, batch_size=batch_size, seed=seed) for s in range(2 * steps)]
    for step, (before, now) in enumerate(pairwise(batches), 1):
        follows = now.numbers == before.numbers + 1
        assert (follows >= now.continues).all()
        # A row stops reading on at the end of an epoch, and at the end of the text.
        assert (now.continues | (now.numbers == 0) | (step % steps == 0)).all()
    assert not batches[0].continues.any()
    for epoch in (batches[:steps], batches[steps:]):
        numbers = np.concatenate([batch.numbers for batch in epoch])
        assert len(set(numbers.tolist())) == steps * batch_size


@given(
    weights=st.lists(st.floats(1e-4, 10), min_size=1, max_size=6),
    batch_size=st.integers(100, 5_000),
    seed=KEY,
)
def test_sources_have_their_shares_and_count_their_rows(
    weights: list[float], batch_size: int, seed: int
) -> None:
    steps = 2 * BLOCK // batch_size + 1
    drawn = [drawn_sources(weights, step=s, batch_size=batch_size, seed=seed) for s in range(steps)]
    sources, before = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    for source in range(len(weights)):
        ranks = before[sources == source]
        assert ranks.tolist() == list(range(len(ranks)))  # no row of a source is left out or repeated
    assert len(sources) >= 2 * BLOCK
    shares = np.bincount(sources[: 2 * BLOCK], minlength=len(weights)) / (2 * BLOCK)
    assert shares == pytest.approx(np.array(weights) / sum(weights), abs=len(weights) / BLOCK)
    again = drawn_sources(weights, step=steps - 1, batch_size=batch_size, seed=seed)
    assert all(map(np.array_equal, again, drawn[-1]))


def test_sources_are_mixed_differently_by_each_seed() -> None:
    one, other = (drawn_sources([1, 1], step=0, batch_size=1_000, seed=seed)[0] for seed in (0, 1))
    assert 400 < (one == other).sum() < 600
    assert 400 < (one[1:] != one[:-1]).sum() < 600  # not in turns


def test_batches_of_one_length_come_in_another_order_in_each_pool() -> None:
    pool, lengths = 16, np.arange(64)[None]  # an epoch is a pool: batch i has the lengths 4 i to 4 i + 3

    def order(block: int, seed: int) -> list[int]:
        steps = range(block * pool, (block + 1) * pool)
        rows = [epoch_rows_by_length(lengths, step=s, batch_size=4, seed=seed, pool=pool) for s in steps]
        return [int(x.min()) // 4 for x in rows]

    orders = [order(0, 0), order(1, 0), order(0, 1)]
    assert all(sorted(x) == list(range(pool)) for x in orders)
    assert len({tuple(x) for x in [*orders, list(range(pool))]}) == 4


def test_sources_are_mixed_differently_in_each_block() -> None:
    one, other = (drawn_sources([1, 1], step=step, batch_size=BLOCK, seed=0)[0] for step in (0, 1))
    assert 0.45 * BLOCK < (one == other).sum() < 0.55 * BLOCK


def test_rows_of_two_epochs_in_one_pool_are_sorted_apart() -> None:
    lengths = np.arange(8)[None]  # a pool of two batches of 8 rows is two epochs
    steps = [epoch_rows_by_length(lengths, step=s, batch_size=8, seed=0, pool=2) for s in range(2)]
    assert [sorted(x.tolist()) for x in steps] == [list(range(8))] * 2


def test_rows_that_read_on_begin_elsewhere_in_each_epoch() -> None:
    firsts = {int(consecutive(100, step=10 * epoch, batch_size=10, seed=0).numbers[0]) for epoch in range(5)}
    assert len(firsts) > 2


def test_rows_are_sorted_by_the_last_lengths_first() -> None:
    lengths = np.stack([np.arange(64)[::-1] % 32, np.arange(64) // 32])
    steps = [epoch_rows_by_length(lengths, step=s, batch_size=4, seed=0, pool=16) for s in range(16)]
    assert all(len(set((x // 32).tolist())) == 1 for x in steps)
