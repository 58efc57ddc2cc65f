"""What the tasks on bits share: fresh examples without end to train on, and a fixed set to validate."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import IGNORED
from unrolled.data import Split, Task
from unrolled.data._checks import check_integer, check_request, check_split

TRAIN_EPOCH = 10_000  # training examples never repeat; this many count as an epoch


class BitsBatch(NamedTuple):
    """Bits to read, and bits to predict.

    Attributes:
        inputs: [B, T, input_size], 0 or 1 in fp32: the bits, then one channel for each delimiter.
        targets: [B, T, n_bits], 0 or 1 in fp32; -100 (`unrolled.contract.IGNORED`) where nothing counts.
    """

    inputs: Tensor
    targets: Tensor


@dataclass
class BitsDataset(ABC):
    """A task whose examples are drawn. A subclass adds its numbers, and draws examples of one size.

    A training batch has one size, drawn from (seed, step), so that short examples cost little. The validation
    set has examples of all sizes, with silence behind the shorter ones.

    Attributes:
        n_bits: bits of a vector.
        val_size: examples of the validation set.
    """

    n_bits: int = 8
    val_size: int = 200

    task: ClassVar[Task] = "bits"

    def __post_init__(self) -> None:
        check_integer("n_bits", self.n_bits, 1)
        check_integer("val_size", self.val_size, 1)
        self._check()
        rng = np.random.default_rng((0, 0, 1))
        rows = [self._padded(self._draw(rng, self._draw_size(rng), 1)) for _ in range(self.val_size)]
        self._val = BitsBatch(*(torch.cat(parts) for parts in zip(*rows, strict=True)))

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

    def epoch_size(self, split: Split) -> int:
        """Return the size of the validation set, or what counts as an epoch of training."""
        check_split(split)
        return TRAIN_EPOCH if split == "train" else self.val_size

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> BitsBatch:
        """Return examples of one size drawn from (seed, step) to train on.

        Of the validation set, return the next ones in order, beginning again after the last.
        """
        check_request(split, step, batch_size, seed)
        if split == "train":
            rng = np.random.default_rng((seed, step, 0))
            return self._draw(rng, self._draw_size(rng), batch_size)
        return self._validation(torch.arange(step * batch_size, (step + 1) * batch_size) % self.val_size)

    def eval_batches(self, batch_size: int) -> Iterator[BitsBatch]:
        """Yield the validation set in order."""
        check_integer("batch_size", batch_size, 1)
        return map(self._validation, torch.split(torch.arange(self.val_size), batch_size))

    def _validation(self, rows: Tensor) -> BitsBatch:
        return BitsBatch(self._val.inputs[rows], self._val.targets[rows])

    def _padded(self, batch: BitsBatch) -> BitsBatch:
        behind = (0, 0, 0, self.length - batch.inputs.shape[1])
        pad = torch.nn.functional.pad
        return BitsBatch(pad(batch.inputs, behind), pad(batch.targets, behind, value=IGNORED))

    @abstractmethod
    def _check(self) -> None:
        """Refuse impossible numbers."""

    @abstractmethod
    def _draw_size(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw the size of an example."""

    @abstractmethod
    def _draw(self, rng: np.random.Generator, size: tuple[int, ...], count: int) -> BitsBatch:
        """Draw `count` examples of a size."""


def check_range(least_name: str, least: object, most_name: str, most: object, minimum: int) -> None:
    """Refuse anything but two integers in order, the lower of at least `minimum`."""
    check_integer(least_name, least, minimum)
    check_integer(most_name, most, minimum)
    if least > most:  # type: ignore[operator]
        raise ValueError(f"{least_name} is {least}, but must be at most {most_name} = {most}")


def as_batch(inputs: np.ndarray, targets: np.ndarray) -> BitsBatch:
    """Convert arrays to tensors of fp32."""
    return BitsBatch(
        torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets.astype(np.float32))
    )
