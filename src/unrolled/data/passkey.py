"""Passkey retrieval (Mohtashami and Jaggi 2023, "Landmark Attention", arXiv 2305.16300, section 4.2).

    f_1 ... f_m, marker, w_1, ..., w_k, f_{m+1} ... f_n, marker, w_1, ..., w_{k-1}
                                           targets from the second marker on: w_1, ..., w_k

with random digits w and a filler f that repeats one passage of `n_filler` different tokens. The passkey is at
the depth m / n of the filler. The paper hides "The pass key is 12345." in repetitions of five sentences with
24 words and full stops together, and ends with "What is the pass key? The pass key is"; here the marker
stands for the words around the passkey in both places. Guessing has an accuracy of 1 / n_symbols for each
digit.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le

from unrolled.contract import IGNORED, Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset
from unrolled.fields import Size


@dataclass
class PasskeyDataset(DrawnDataset):
    """Unlimited random training examples, and a fixed validation set.

    Attributes:
        length: inputs per example, T = n + 2 k + 1.
        key_length: digits of the passkey, k.
        n_symbols: distinct digits; their ids are 0 to n_symbols - 1, and the marker is n_symbols.
        n_filler: tokens of the passage; their ids follow that of the marker.
        depth: m / n, where m is rounded; None to draw m uniformly from 0 to n.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: Size = 256
    key_length: Size = 5
    n_symbols: Size = 10
    n_filler: Size = 24
    depth: Annotated[float, Ge(0), Le(1)] | None = None
    val_size: Size = 1_000

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        """The digits, the marker and the filler."""
        return self.n_symbols + 1 + self.n_filler

    def _check(self) -> None:
        least = 2 * self.key_length + 1
        if self.length < least:
            raise ValueError(f"length is {self.length}, but must be at least 2 key_length + 1 = {least}")

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        k = self.key_length
        n = self.length - 2 * k - 1
        said = np.full((count, k + 1), self.n_symbols)
        said[:, 1:] = rng.integers(self.n_symbols, size=(count, k))
        if self.depth is None:
            before = rng.integers(n, size=(count, 1), endpoint=True)
        else:
            before = np.full((count, 1), round(self.depth * n))
        place = np.arange(n + k + 1)
        read = self.n_symbols + 1 + np.where(place < before, place, place - k - 1) % self.n_filler
        np.put_along_axis(read, before + np.arange(k + 1), said, axis=1)
        tokens = np.concatenate([read, said], axis=1)
        targets = np.full((count, self.length), IGNORED)
        targets[:, -k:] = said[:, 1:]
        return Batch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets))
