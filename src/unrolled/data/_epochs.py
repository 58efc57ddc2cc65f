"""Base class of data sets that are read in epochs, and the order of their examples."""

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Batch, Split
from unrolled.data._base import BaseDataset
from unrolled.data._checks import check_batch_size, check_request, check_split


def epoch_rows(size: int, *, step: int, batch_size: int, seed: int) -> Tensor:
    """Return the rows of batch `step` in an endless stream of epochs over `size` examples, [batch_size].

    Epoch e is a permutation drawn from (seed, e). Batches are consecutive and may span epochs, so
    every epoch has each example exactly once for any batch size.
    """
    place = np.arange(step * batch_size, (step + 1) * batch_size)
    epoch, offset = place // size, place % size
    rows = np.empty(batch_size, np.int64)
    for e in range(epoch[0], epoch[-1] + 1):
        permutation = np.random.default_rng((seed, e)).permutation(size)
        rows[epoch == e] = permutation[offset[epoch == e]]
    return torch.from_numpy(rows)


def epoch_rows_by_length(lengths: np.ndarray, *, step: int, batch_size: int, seed: int, pool: int) -> Tensor:
    """Return the rows of batch `step`, which have similar lengths, [batch_size].

    The rows of `pool` random batches are sorted by length and cut into batches again, and these batches are
    shuffled. Each epoch has every row once. Rows of different epochs are sorted apart: otherwise, the same
    row of two epochs would always be in one batch, as its lengths are equal.

    Args:
        lengths: [K, size], the sort keys of the rows; the last of the K is compared first.
        step, batch_size, seed: as for `epoch_rows`.
        pool: number of batches that are sorted together.
    """
    block, place = divmod(step, pool)
    rows = epoch_rows(lengths.shape[1], step=block, batch_size=pool * batch_size, seed=seed)
    epochs = np.arange(block * len(rows), (block + 1) * len(rows)) // lengths.shape[1]
    batches = rows[np.lexsort([*lengths[:, rows], epochs])].reshape(pool, batch_size)
    return batches[np.random.default_rng((seed, block, 1)).permutation(pool)[place]]


class EpochDataset(BaseDataset):
    """A fixed number of examples, read in epochs. A subclass counts them, and makes batches of them."""

    @abstractmethod
    def _count(self, split: Split) -> int:
        """Return the number of examples of a split."""

    @abstractmethod
    def _rows(self, split: Split, rows: Tensor) -> Batch:
        """Return a batch of the examples with these indices."""

    def epoch_size(self, split: Split) -> int:
        """Return the number of examples of a split."""
        check_split(split)
        return self._count(split)

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return batch number `step` of the epochs drawn from `seed`; see `epoch_rows`."""
        check_request(split, step, batch_size, seed)
        rows = epoch_rows(self._count(split), step=step, batch_size=batch_size, seed=seed)
        return self._rows(split, rows)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the validation examples, always in the same order."""
        check_batch_size(batch_size)
        return (self._rows("val", x) for x in torch.split(torch.arange(self._count("val")), batch_size))
