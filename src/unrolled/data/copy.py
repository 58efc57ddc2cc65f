"""The copy task of Katharopoulos et al. 2020 (arXiv 2006.16236, §4.1.1): repeat a word of random symbols.

With w a word of n random symbols and s a separator, a sequence is (w_1, ..., w_n, s, w_1, ..., w_n, s, ...).
Only the second w can be known, so only it is a target. The default is the paper's: 10 symbols, a separator,
at most 128 tokens; n is drawn from length / 4 to length / 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import IGNORED
from unrolled.data import Batch, Split, Task
from unrolled.data._checks import check_integer, check_request, check_split

TRAIN_EPOCH = 6_400  # training examples never repeat; the paper's code calls 100 batches of 64 an epoch


@dataclass
class CopyDataset:
    """Fresh examples without end to train on, and a fixed set to validate.

    Attributes:
        length: inputs per example, T; the longest word has length // 2 symbols.
        n_symbols: distinct symbols; their ids are 0 to n_symbols - 1, and the separator is n_symbols.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: int = 128
    n_symbols: int = 10
    val_size: int = 1_000

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("length", self.length, 2)
        check_integer("n_symbols", self.n_symbols, 1)
        check_integer("val_size", self.val_size, 1)
        self._val = self._draw(np.random.default_rng((0, 0, 1)), self.val_size)

    @property
    def vocab_size(self) -> int:
        """The symbols and the separator."""
        return self.n_symbols + 1

    def epoch_size(self, split: Split) -> int:
        """Return the size of the validation set, or what counts as an epoch of training."""
        check_split(split)
        return TRAIN_EPOCH if split == "train" else self.val_size

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return examples drawn from (seed, step) to train on.

        Of the validation set, return the next ones in order, beginning again after the last.
        """
        check_request(split, step, batch_size, seed)
        if split == "train":
            return self._draw(np.random.default_rng((seed, step, 0)), batch_size)
        return self._validation(torch.arange(step * batch_size, (step + 1) * batch_size) % self.val_size)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the validation set in order."""
        check_integer("batch_size", batch_size, 1)
        return map(self._validation, torch.split(torch.arange(self.val_size), batch_size))

    def _validation(self, rows: Tensor) -> Batch:
        return Batch(self._val.inputs[rows], self._val.targets[rows])

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        longest = self.length // 2
        n = rng.integers((longest + 1) // 2, longest, size=(count, 1), endpoint=True)
        word = rng.integers(self.n_symbols, size=(count, longest))
        place = np.arange(self.length + 1)
        copied = (n < place) & (place <= 2 * n)
        symbol = np.where(copied, place - n - 1, place).clip(max=longest - 1)
        tokens = np.where((place < n) | copied, np.take_along_axis(word, symbol, axis=1), self.n_symbols)
        targets = np.where(copied, tokens, IGNORED)
        return Batch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:]))
