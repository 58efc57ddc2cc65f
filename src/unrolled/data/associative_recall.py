"""The associative recall of the Neural Turing Machine (arXiv 1410.5401, section 4.3).

    (next, v x 3) for each item, query, v x 3 of one item but the last, query, silence x 3
                                                    targets at the silence: the item after the queried one

with random vectors v of bits, 3 for each item, and the delimiters "next" and "query" on separate channels.
The default is the paper's: 2 to 6 items of 3 vectors of 6 bits.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from unrolled.contract import IGNORED, Batch
from unrolled.data._bits import BitsDataset, as_batch
from unrolled.fields import Size


@dataclass
class AssociativeRecallDataset(BitsDataset):
    """Lists of items; given one of the items, the model recalls the next one.

    Attributes:
        n_bits: bits of a vector.
        val_size: examples of the validation set.
        item_length: vectors of an item.
        min_items, max_items: items of the shortest and the longest list.

    Raises:
        ValueError: an option is impossible.
    """

    n_bits: Size = 6
    item_length: Size = 3
    min_items: Annotated[int, Ge(2)] = 2
    max_items: Annotated[int, Ge(2)] = 6

    _drawn: ClassVar[tuple[str, ...]] = ("items",)

    @property
    def input_size(self) -> int:
        """The bits, next and query."""
        return self.n_bits + 2

    @property
    def length(self) -> int:
        """Steps of the longest example."""
        return self._steps(self.max_items)

    def _steps(self, items: int) -> int:
        return items * (self.item_length + 1) + 2 * self.item_length + 2

    def _draw_examples(self, rng: np.random.Generator, size: tuple[int, ...], count: int) -> Batch:
        (n,), L = size, self.item_length
        items = rng.integers(2, size=(count, n, L, self.n_bits))
        asked, row = rng.integers(n - 1, size=count), np.arange(count)
        inputs = np.zeros((count, self._steps(n), self.input_size))
        listed = inputs[:, : n * (L + 1)].reshape(count, n, L + 1, self.input_size)  # a view
        listed[:, :, 0, -2] = 1
        listed[:, :, 1:, : self.n_bits] = items
        query = n * (L + 1)
        inputs[:, [query, query + L + 1], -1] = 1
        inputs[:, query + 1 : query + L + 1, : self.n_bits] = items[row, asked]
        targets = np.full((count, self._steps(n), self.n_bits), IGNORED)
        targets[:, -L:] = items[row, asked + 1]
        return as_batch(inputs, targets)
