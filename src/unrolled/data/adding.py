"""The adding problem (Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", section 5.4).

    inputs (x_t, m_t)        target x_i + x_j        m_i = m_j = 1, all others 0

with x_t uniform in [0, 1), i drawn from the first half of the sequence, and j drawn from the second half, as
in most later work (Arjovsky et al. 2016, arXiv 1511.06464, section 4.2). Always predicting 1 has a mean
squared error of 1/6.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge

from unrolled.contract import Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset
from unrolled.fields import Size


@dataclass
class AddingDataset(DrawnDataset):
    """Unlimited random training examples, and a fixed validation set.

    Attributes:
        length: steps of a sequence, T.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: Annotated[int, Ge(2)] = 100
    val_size: Size = 1_000

    task: ClassVar[Task] = "numbers"
    input_size: ClassVar[int] = 2
    output_size: ClassVar[int] = 1

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        numbers, row = rng.random((count, self.length)), np.arange(count)
        marks = np.zeros_like(numbers)
        half = self.length // 2
        for place in (rng.integers(half, size=count), rng.integers(half, self.length, size=count)):
            marks[row, place] = 1
        inputs = np.stack([numbers, marks], -1).astype(np.float32)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(inputs.prod(-1).sum(-1)))
