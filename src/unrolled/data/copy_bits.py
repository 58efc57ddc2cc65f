"""The copy task of the Neural Turing Machine (arXiv 1410.5401, section 4.1): repeat a sequence.

    start, v_1, ..., v_n, end, silence x n        targets at the silence: v_1, ..., v_n

with random vectors v of bits, and start and end on separate channels. The default is the paper's: 1 to 20
vectors of 8 bits.
"""

from dataclasses import dataclass

import numpy as np

from unrolled.contract import IGNORED, Batch
from unrolled.data._bits import BitsDataset, as_batch
from unrolled.fields import Size


@dataclass
class CopyBitsDataset(BitsDataset):
    """Sequences of random vectors to copy; `min_length = max_length` gives sequences of one length.

    Attributes:
        n_bits: bits of a vector.
        val_size: examples of the validation set.
        min_length, max_length: vectors of the shortest and the longest sequence.

    Raises:
        ValueError: an option is impossible.
    """

    min_length: Size = 1
    max_length: Size = 20

    @property
    def input_size(self) -> int:
        """The bits, start and end."""
        return self.n_bits + 2

    @property
    def length(self) -> int:
        """Steps of the longest example."""
        return 2 * self.max_length + 2

    def _draw_examples(self, rng: np.random.Generator, size: tuple[int, ...], count: int) -> Batch:
        (n,) = size
        vectors = rng.integers(2, size=(count, n, self.n_bits))
        inputs = np.zeros((count, 2 * n + 2, self.input_size))
        inputs[:, 1 : n + 1, : self.n_bits] = vectors
        inputs[:, 0, -2] = inputs[:, n + 1, -1] = 1
        targets = np.full((count, 2 * n + 2, self.n_bits), IGNORED)
        targets[:, n + 2 :] = vectors
        return as_batch(inputs, targets)
