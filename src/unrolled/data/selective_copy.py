"""Selective copying (Gu and Dao 2023, "Mamba", arXiv 2312.00752, sections 3.1 and 4.1.1, appendix E.1).

    x_1 ... x_{T-n}, marker x n                    targets at the markers: w_1, ..., w_n

where x is noise except at n random places, which hold random symbols w_1, ..., w_n in this order. Since the
distances vary, a model must select by content; at fixed distances, a convolution can copy. Jing et al. 2019
(arXiv 1706.02761) call this the denoise task.

The default has the paper's 16 ids (14 symbols, noise and marker) and 16 symbols to copy, but sequences of 256
tokens; those of the paper have 4,096 (`length=4096`). Guessing symbols has an accuracy of 1 / n_symbols.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from unrolled.contract import IGNORED, Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset, permutations
from unrolled.fields import Size


@dataclass
class SelectiveCopyDataset(DrawnDataset):
    """Unlimited random training examples, and a fixed validation set.

    Attributes:
        length: inputs per example, T, including the markers; at least 2 n_tokens.
        n_tokens: symbols to copy, n.
        n_symbols: distinct symbols; their ids are 0 to n_symbols - 1, noise is n_symbols, and the marker
            n_symbols + 1.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: Size = 256
    n_tokens: Size = 16
    n_symbols: Size = 14
    val_size: Size = 1_000

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        """The symbols, noise and the marker."""
        return self.n_symbols + 2

    def _check(self) -> None:
        if self.length < 2 * self.n_tokens:
            raise ValueError(
                f"length is {self.length}, but must be at least 2 n_tokens = {2 * self.n_tokens}"
            )

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        read = self.length - self.n_tokens
        word = rng.integers(self.n_symbols, size=(count, self.n_tokens))
        places = np.sort(permutations(rng, count, read)[:, : self.n_tokens], axis=1)
        inputs = np.full((count, self.length), self.n_symbols)
        inputs[:, read:] += 1
        np.put_along_axis(inputs, places, word, axis=1)
        targets = np.full_like(inputs, IGNORED)
        targets[:, read:] = word
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
