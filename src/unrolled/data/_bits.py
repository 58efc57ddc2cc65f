"""Base class of tasks on bits: a training batch has examples of one size, the validation set of all sizes."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from unrolled.contract import IGNORED, Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset
from unrolled.fields import Size
from unrolled.ops.masks import padding_mask


@dataclass
class BitsDataset(DrawnDataset):
    """A task on vectors of bits. A subclass adds options for the sizes, and draws examples of a given size.

    Inputs are `[B, T, input_size]`, 0 or 1: the bits, then one channel for each delimiter; targets are
    `[B, T, output_size]`. All examples of a training batch have one size, drawn from (seed, step), so batches
    of short examples take little time. The validation set has examples of all sizes; the shorter ones are
    padded, with a mask.

    Attributes:
        n_bits: bits of a vector.
        val_size: examples of the validation set.
    """

    n_bits: Size = 8
    val_size: Size = 200

    task: ClassVar[Task] = "bits"
    # Names of the sizes, which are drawn uniformly from the option min_<name> to the option max_<name>.
    _drawn: ClassVar[tuple[str, ...]] = ("length",)

    @property
    def output_size(self) -> int:
        """Bits to predict at each step."""
        return self.n_bits

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Channels of the inputs: the bits and the delimiters."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Steps of the longest example."""

    def _check(self) -> None:
        for name in self._drawn:
            least, most = self._range(name)
            if least > most:
                raise ValueError(f"min_{name} is {least}, but must be at most max_{name} = {most}")

    def _range(self, name: str) -> tuple[int, int]:
        return vars(self)[f"min_{name}"], vars(self)[f"max_{name}"]

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        sizes = (rng.integers(*self._range(name), endpoint=True) for name in self._drawn)
        return self._draw_examples(rng, tuple(map(int, sizes)), count)

    def _draw_validation(self, rng: np.random.Generator) -> Batch:
        rows = [self._draw(rng, 1) for _ in range(self.val_size)]
        sizes = torch.tensor([row.inputs.shape[1] for row in rows])
        inputs = pad_sequence([row.inputs[0] for row in rows], batch_first=True)
        targets = pad_sequence([row.targets[0] for row in rows], batch_first=True, padding_value=IGNORED)
        return Batch(inputs, targets, padding_mask(sizes))

    @abstractmethod
    def _draw_examples(self, rng: np.random.Generator, size: tuple[int, ...], count: int) -> Batch:
        """Draw `count` examples; `size` has a number for each name in `_drawn`."""


def as_batch(inputs: np.ndarray, targets: np.ndarray) -> Batch:
    """Convert arrays to tensors of fp32."""
    return Batch(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets.astype(np.float32)))
