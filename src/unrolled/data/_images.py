"""Base classes of data sets that are read in epochs, such as images, and the order of their examples."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Batch, Split
from unrolled.data._base import BaseDataset, Task
from unrolled.data._checks import check_batch_size, check_request, check_split
from unrolled.data._vocabulary import Vocabulary


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


class ImageDataset(EpochDataset):
    """Images in grey or colour, read row by row as sequences of levels.

    With p the T levels of an image (T = H W in grey, 3 H W in colour), and s = `vocab_size` the start symbol,

        inputs = (s, p_1, ..., p_{T-1}),   targets = (p_1, ..., p_T).

    A subclass is a dataclass whose fields are its options; it sets the class variables and reads the pixels.
    """

    task: ClassVar[Task] = "tokens"
    vocab_size: ClassVar[int]
    shape: ClassVar[tuple[int, ...]]
    start_token: ClassVar[bool] = True
    recipe: ClassVar[str] = "pixels"

    @abstractmethod
    def _read(self) -> dict[Split, Tensor]:
        """Return the images of both splits, uint8 [N, H, W] or [N, H, W, 3]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._images = self._read()

    @property
    def length(self) -> int:
        """Levels per image."""
        return math.prod(self.shape)

    @property
    def vocabulary(self) -> Vocabulary:
        """Ids are levels, and a sequence is an image."""
        return Vocabulary("image", shape=list(self.shape), data=self.name)

    def images(self, split: Split) -> Tensor:
        """Return the images of a split, uint8 [N, H, W] or [N, H, W, 3]."""
        check_split(split)
        return self._images[split]

    def _count(self, split: Split) -> int:
        return len(self._images[split])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        pixels = self._images[split][rows].flatten(1).long()
        start = pixels.new_full((len(pixels), 1), self.vocab_size)
        return Batch(torch.cat([start, pixels[:, :-1]], dim=1), pixels)


class LabelledImages(EpochDataset):
    """Images as sequences of grey levels, with one of ten labels for each.

    A subclass sets `length`, and `_examples` to the levels and the labels of each split.
    """

    task: ClassVar[Task] = "labels"
    vocab_size: ClassVar[int] = 256
    n_classes: ClassVar[int] = 10
    _examples: dict[Split, tuple[Tensor, Tensor]]

    def _count(self, split: Split) -> int:
        return len(self._examples[split][0])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        levels, labels = self._examples[split]
        return Batch(levels[rows].long(), labels[rows].long())
