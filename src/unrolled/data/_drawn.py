"""Base class of synthetic tasks: unlimited random training examples, and a fixed validation set."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Batch, Split
from unrolled.data._base import BaseDataset
from unrolled.data._checks import check_batch_size, check_request, check_split


class DrawnDataset(BaseDataset):
    """A task with random examples. A subclass has the option `val_size`, and draws the examples."""

    train_epoch: ClassVar[int] = 10_000  # training examples never repeat; this many count as an epoch
    val_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check()
        self._open()
        self._val = self._draw_validation(np.random.default_rng((0, 0, 1)))

    def epoch_size(self, split: Split) -> int:
        """Return the size of the validation set, or the number of training examples of an epoch."""
        check_split(split)
        return self.train_epoch if split == "train" else self.val_size

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return training examples drawn from (seed, step), or consecutive examples of the validation set.

        After the last validation example, the first one follows again.
        """
        check_request(split, step, batch_size, seed)
        if split == "train":
            return self._draw(np.random.default_rng((seed, step, 0)), batch_size)
        return self._validation(torch.arange(step * batch_size, (step + 1) * batch_size) % self.val_size)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the validation set in order."""
        check_batch_size(batch_size)
        return map(self._validation, torch.split(torch.arange(self.val_size), batch_size))

    def _validation(self, rows: Tensor) -> Batch:
        """Return these rows of the validation examples, padded to the longest of them."""
        inputs, targets, padding, *_ = self._val
        if padding is None:
            return Batch(inputs[rows], targets[rows])
        length = int((~padding[rows]).sum(1).max())
        of_rows = targets[rows, :length] if targets.shape[:2] == padding.shape else targets[rows]
        return Batch(inputs[rows, :length], of_rows, padding[rows, :length])

    def _check(self) -> None:
        """Raise ValueError if options contradict each other."""

    def _open(self) -> None:
        """Read the files that the examples are made of."""

    @abstractmethod
    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        """Draw `count` examples."""

    def _draw_validation(self, rng: np.random.Generator) -> Batch:
        """Draw the validation set."""
        return self._draw(rng, self.val_size)


def permutations(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Draw `count` permutations of the numbers from 0 to size - 1: [count, size]."""
    return rng.permuted(np.tile(np.arange(size, dtype=np.int32), (count, 1)), axis=1)
