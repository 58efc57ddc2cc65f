"""Base classes of images, read row by row."""

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from unrolled.contract import Batch, Split
from unrolled.data._base import Task
from unrolled.data._checks import check_split
from unrolled.data._epochs import EpochDataset
from unrolled.data._vocabulary import Vocabulary


class ImageDataset(EpochDataset):
    """Images in grey or colour, read row by row as sequences of levels.

    With p the T levels of an image (T = H W in grey, 3 H W in colour), and s = `vocab_size` the start symbol,

        inputs = (s, p_1, ..., p_{T-1}),   targets = (p_1, ..., p_T).

    A subclass is a dataclass whose fields are its options; it sets the class variables and reads the pixels.
    """

    task: ClassVar[Task] = "tokens"
    vocab_size: ClassVar[int]
    shape: ClassVar[tuple[int, ...]]
    start_token: ClassVar[bool] = True
    recipe: ClassVar[str] = "pixels"

    @abstractmethod
    def _read(self) -> dict[Split, Tensor]:
        """Return the images of both splits, uint8 [N, H, W] or [N, H, W, 3]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._images = self._read()

    @property
    def length(self) -> int:
        """Levels per image."""
        return math.prod(self.shape)

    @property
    def vocabulary(self) -> Vocabulary:
        """Ids are levels, and a sequence is an image."""
        return Vocabulary("image", shape=list(self.shape), data=self.name)

    def images(self, split: Split) -> Tensor:
        """Return the images of a split, uint8 [N, H, W] or [N, H, W, 3]."""
        check_split(split)
        return self._images[split]

    def _count(self, split: Split) -> int:
        return len(self._images[split])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        pixels = self._images[split][rows].flatten(1).long()
        start = pixels.new_full((len(pixels), 1), self.vocab_size)
        return Batch(torch.cat([start, pixels[:, :-1]], dim=1), pixels)


class LabelledImages(EpochDataset):
    """Images as sequences of grey levels, with one of ten labels for each.

    A subclass sets `length`, and `_examples` to the levels and the labels of each split.
    """

    task: ClassVar[Task] = "labels"
    vocab_size: ClassVar[int] = 256
    n_classes: ClassVar[int] = 10
    _examples: dict[Split, tuple[Tensor, Tensor]]

    def _count(self, split: Split) -> int:
        return len(self._examples[split][0])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        levels, labels = self._examples[split]
        return Batch(levels[rows].long(), labels[rows].long())
