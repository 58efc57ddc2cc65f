"""The windows of a long sequence that the rows of a training batch hold."""

from typing import Literal, NamedTuple

import numpy as np

from unrolled.data._permutation import permuted

Order = Literal["random", "consecutive"]
"""The order of training windows: random, or such that each row continues that of the previous batch."""


class Windows(NamedTuple):
    """The windows of a batch.

    Attributes:
        numbers: int64 [B], the windows.
        continues: bool [B], whether a row continues where the same row of the previous batch ended.
    """

    numbers: np.ndarray
    continues: np.ndarray


def shuffled(size: int, places: np.ndarray, *key: int) -> np.ndarray:
    """Return the windows at these places in an endless stream of epochs, each in its own random order.

    Args:
        size: number of windows.
        places: int64 [B].
        key: integers that determine the orders, together with the number of the epoch.
    """
    epochs, offsets = places // size, places % size
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        found[chosen] = permuted(offsets[chosen], size, *key, int(epoch))
    return found


def shifted(size: int, length: int, places: np.ndarray, seed: int) -> np.ndarray:
    """Return where windows begin in a sequence, for an endless stream of epochs.

    The windows of an epoch follow one another from an offset drawn from (seed, epoch), and stand in random
    order. An epoch leaves out fewer than 2 `length` elements, at the two ends of the sequence.

    Args:
        size: number of elements of the sequence, at least `length`.
        length: number of elements of a window.
        places: int64 [B], places in the stream.
        seed: determines the offsets and the orders.
    """
    count = max(1, size // length - 1)
    epochs = places // count
    offsets = {e: np.random.default_rng((seed, e)).integers(size - count * length + 1) for e in set(epochs)}
    return shuffled(count, places, seed, 0) * length + [offsets[e] for e in epochs]


def consecutive(size: int, *, step: int, batch_size: int, seed: int) -> Windows:
    """Return the windows of batch `step` if every row continues that of the previous batch.

    With m = size // batch_size, row r of an epoch reads the windows o + r m to o + (r + 1) m - 1, one in each
    batch, and does not continue into the next epoch. The offset o is drawn from (seed, epoch). After the last
    window of the sequence, a row reads the first one, and does not continue there either.

    Raises:
        ValueError: there are fewer windows than rows.
    """
    if size < batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, but must be at most {size} with order='consecutive', the number of "
            "windows, since every row of a batch reads windows of its own"
        )
    each = size // batch_size
    epoch, place = divmod(step, each)
    offset = int(np.random.default_rng((seed, epoch)).integers(size))
    numbers = (offset + np.arange(batch_size) * each + place) % size
    return Windows(numbers, (numbers != 0) & (place > 0))
