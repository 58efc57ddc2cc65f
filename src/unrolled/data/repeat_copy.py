"""The repeat copy task of the Neural Turing Machine (arXiv 1410.5401, section 4.2).

    start, v_1, ..., v_n, repeats, silence x (n r + 1)
                                             targets at the silence: v_1, ..., v_n, r times, and end

with random vectors v of bits. The channel of the repeats holds r, normalised to mean 0 and standard deviation
1 over the default range. The start and the end have separate channels, and at the end all bits are 0. The
default is the paper's: 1 to 10 vectors of 8 bits, 1 to 10 times.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unrolled.contract import IGNORED, Batch
from unrolled.data._bits import BitsDataset, as_batch
from unrolled.fields import Size

MEAN, DEVIATION = 5.5, math.sqrt(33 / 4)  # of 1 to 10 for any range, so that the scale of the input is fixed


@dataclass
class RepeatCopyDataset(BitsDataset):
    """Sequences of random vectors to copy several times.

    Attributes:
        n_bits: bits of a vector.
        val_size: examples of the validation set.
        min_length, max_length: vectors of the shortest and the longest sequence.
        min_repeats, max_repeats: smallest and largest number of repeats.

    Raises:
        ValueError: an option is impossible.
    """

    min_length: Size = 1
    max_length: Size = 10
    min_repeats: Size = 1
    max_repeats: Size = 10

    _drawn: ClassVar[tuple[str, ...]] = ("length", "repeats")

    @property
    def input_size(self) -> int:
        """The bits, start and repeats."""
        return self.n_bits + 2

    @property
    def output_size(self) -> int:
        """The bits and the end."""
        return self.n_bits + 1

    @property
    def length(self) -> int:
        """Steps of the longest example."""
        return self.max_length * (self.max_repeats + 1) + 3

    def _draw_examples(self, rng: np.random.Generator, size: tuple[int, ...], count: int) -> Batch:
        n, repeats = size
        steps = n * (repeats + 1) + 3
        vectors = rng.integers(2, size=(count, n, self.n_bits))
        inputs = np.zeros((count, steps, self.input_size))
        inputs[:, 0, -2] = 1
        inputs[:, 1 : n + 1, : self.n_bits] = vectors
        inputs[:, n + 1, -1] = (repeats - MEAN) / DEVIATION
        targets = np.full((count, steps, self.output_size), IGNORED)
        targets[:, n + 2 :] = 0
        targets[:, n + 2 : -1, : self.n_bits] = np.tile(vectors, (1, repeats, 1))
        targets[:, -1, -1] = 1
        return as_batch(inputs, targets)
