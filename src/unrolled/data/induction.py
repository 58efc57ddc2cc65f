"""The induction heads task (Gu and Dao 2023, "Mamba", arXiv 2312.00752, sections 3.1 and 4.1.2).

    x_1 ... x_{i-1} s x_{i+1} ... x_{T-1} s                    target at the second s: x_{i+1}

with s a special token, i drawn from 1 to T - 2, and random symbols x. Induction heads are the attention heads
that complete "A B ... A" by B (Olsson et al. 2022, arXiv 2209.11895). The default is the paper's: 256 tokens
of 16 ids, including the special token. The paper evaluates the trained models on up to 2^20 tokens. Guessing
symbols has an accuracy of 1 / n_symbols.
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
class InductionDataset(DrawnDataset):
    """Unlimited random training examples, and a fixed validation set.

    Attributes:
        length: inputs per example, T.
        n_symbols: distinct symbols; their ids are 0 to n_symbols - 1, and the special token is n_symbols.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: Annotated[int, Ge(3)] = 256
    n_symbols: Size = 15
    val_size: Size = 1_000

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        """The symbols and the special token."""
        return self.n_symbols + 1

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        inputs = rng.integers(self.n_symbols, size=(count, self.length))
        row, first = np.arange(count), rng.integers(self.length - 2, size=count)
        inputs[row, first] = inputs[:, -1] = self.n_symbols
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = inputs[row, first + 1]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
