"""The adding problem (Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", section 5.4).

    inputs (x_t, m_t)        target x_i + x_j        m_i = m_j = 1, all others 0

with x_t uniform in [0, 1), i drawn from the first half of the sequence and j from the second, as most later
work has it (Arjovsky et al. 2016, arXiv 1511.06464, section 4.2). Always to say 1 has the mean squared error
1/6.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unrolled.data import Split, Task
from unrolled.data._checks import check_integer, check_request, check_split

TRAIN_EPOCH = 10_000  # training examples never repeat; this many count as an epoch


class NumbersBatch(NamedTuple):
    """Sequences to read, and one number for each.

    Attributes:
        inputs: [B, T, 2], fp32.
        targets: [B], fp32.
    """

    inputs: Tensor
    targets: Tensor


@dataclass
class AddingDataset:
    """Fresh examples without end to train on, and a fixed set to validate.

    Attributes:
        length: steps of a sequence, T.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: int = 100
    val_size: int = 1_000

    task: ClassVar[Task] = "numbers"
    input_size: ClassVar[int] = 2
    output_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_integer("length", self.length, 2)
        check_integer("val_size", self.val_size, 1)
        self._val = self._draw(np.random.default_rng((0, 0, 1)), self.val_size)

    def epoch_size(self, split: Split) -> int:
        """Return the size of the validation set, or what counts as an epoch of training."""
        check_split(split)
        return TRAIN_EPOCH if split == "train" else self.val_size

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> NumbersBatch:
        """Return examples drawn from (seed, step) to train on.

        Of the validation set, return the next ones in order, beginning again after the last.
        """
        check_request(split, step, batch_size, seed)
        if split == "train":
            return self._draw(np.random.default_rng((seed, step, 0)), batch_size)
        return self._validation(torch.arange(step * batch_size, (step + 1) * batch_size) % self.val_size)

    def eval_batches(self, batch_size: int) -> Iterator[NumbersBatch]:
        """Yield the validation set in order."""
        check_integer("batch_size", batch_size, 1)
        return map(self._validation, torch.split(torch.arange(self.val_size), batch_size))

    def _validation(self, rows: Tensor) -> NumbersBatch:
        return NumbersBatch(self._val.inputs[rows], self._val.targets[rows])

    def _draw(self, rng: np.random.Generator, count: int) -> NumbersBatch:
        numbers, marks, row = (
            rng.random((count, self.length)),
            np.zeros((count, self.length)),
            np.arange(count),
        )
        half = self.length // 2
        for place in (rng.integers(half, size=count), rng.integers(half, self.length, size=count)):
            marks[row, place] = 1
        inputs = np.stack([numbers, marks], -1).astype(np.float32)
        return NumbersBatch(torch.from_numpy(inputs), torch.from_numpy(inputs.prod(-1).sum(-1)))
