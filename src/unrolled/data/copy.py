"""The copy task of Katharopoulos et al. 2020 (arXiv 2006.16236, §4.1.1): repeat a word of random symbols.

With w a word of n random symbols and s a separator, a sequence is (w_1, ..., w_n, s, w_1, ..., w_n, s, ...).
Only the second w can be predicted, so only its symbols are targets. The default is the paper's: 10 symbols, a
separator, at most 128 tokens. n is drawn from length / 4 to length / 2.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge

from unrolled.contract import IGNORED, Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset
from unrolled.fields import Size


@dataclass
class CopyDataset(DrawnDataset):
    """Unlimited random training examples, and a fixed validation set.

    Attributes:
        length: inputs per example, T; the longest word has length // 2 symbols.
        n_symbols: distinct symbols; their ids are 0 to n_symbols - 1, and the separator is n_symbols.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: Annotated[int, Ge(2)] = 128
    n_symbols: Size = 10
    val_size: Size = 1_000

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False
    train_epoch: ClassVar[int] = 6_400  # the paper's code calls 100 batches of 64 an epoch

    @property
    def vocab_size(self) -> int:
        """The symbols and the separator."""
        return self.n_symbols + 1

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
