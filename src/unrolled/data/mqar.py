"""Multi-query associative recall, MQAR (Arora et al. 2023, "Zoology", arXiv 2312.04927, section 4).

    k_1 v_1 k_2 v_2 ... k_P v_P  x ... x k_2 x ... x k_1 x ... x          target at each later k_i: v_i

with P pairs of different keys and different values, and filler x. Ids below vocab_size // 2 are keys, all
other ids are values. Each key is asked for once, at a position 2 P + 2 g with 0 <= g < n = (T - 2 P) // 2.
The g are drawn for k_1, k_2, ... in turn, without replacement, with probabilities proportional to
(g + 1)^(a - 1): with a small power a, keys are asked for soon; with a = 1, anywhere. There are no other
targets.

This is the authors' generator (github.com/HazyResearch/zoology, `multiquery_ar.py`) except for the filler.
The authors' filler is any id; here it is any id but the keys of the example, so that a key occurs only in its
pair and its query. As in the authors' generator, the value does not follow the query in the inputs. The
default is the smallest size of the paper's Figure 2. Guessing one of the values of the example has an
accuracy of 1 / P, and guessing any value an accuracy of 2 / vocab_size.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Gt, Le

from unrolled.contract import IGNORED, Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset, permutations
from unrolled.fields import Size


@dataclass
class MqarDataset(DrawnDataset):
    """Unlimited random training examples, and a fixed validation set.

    Attributes:
        length: inputs per example, T, at least 4 n_pairs.
        n_pairs: pairs of a key and its value, P.
        vocab_size: keys and values, at least 2 n_pairs.
        power: a, above 0 and at most 1.
        val_size: examples of the validation set.

    Raises:
        ValueError: an option is impossible.
    """

    length: Size = 64
    n_pairs: Size = 4
    vocab_size: Size = 8_192
    power: Annotated[float, Gt(0), Le(1)] = 0.01
    val_size: Size = 1_000

    task: ClassVar[Task] = "tokens"
    start_token: ClassVar[bool] = False

    def _check(self) -> None:
        for name, factor in {"length": 4, "vocab_size": 2}.items():
            given, least = vars(self)[name], factor * self.n_pairs
            if given < least:
                raise ValueError(f"{name} is {given}, but must be at least {factor} n_pairs = {least}")

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        pairs, n_keys = self.n_pairs, self.vocab_size // 2
        keys = permutations(rng, count, n_keys)
        values = n_keys + permutations(rng, count, self.vocab_size - n_keys)
        filler = np.concatenate([keys[:, pairs:], values], axis=1)
        keys, values = keys[:, :pairs], values[:, :pairs]
        drawn = rng.integers(filler.shape[1], size=(count, self.length))
        inputs = np.take_along_axis(filler, drawn, axis=1).astype(np.int64)
        inputs[:, 0 : 2 * pairs : 2] = keys
        inputs[:, 1 : 2 * pairs : 2] = values
        asked = 2 * pairs + 2 * self._places(rng, count)
        np.put_along_axis(inputs, asked, keys, axis=1)
        targets = np.full_like(inputs, IGNORED)
        np.put_along_axis(targets, asked, values, axis=1)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))

    def _places(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw g for each key: [count, n_pairs]."""
        n = (self.length - 2 * self.n_pairs) // 2
        rate = np.arange(1.0, n + 1) ** (self.power - 1)
        # Exponential clocks of these rates ring in the order of weighted draws without replacement.
        return (rng.exponential(size=(count, n)) / rate).argsort(axis=1)[:, : self.n_pairs]
