"""Moving MNIST: follow one of the digits of a video, given its mask in the first frame.

The videos are those of Srivastava, Mansimov and Salakhutdinov 2015, "Unsupervised Learning of Video
Representations using LSTMs", arXiv 1502.04681, section 3.1. Digits move in a straight line and bounce off the
borders; where they overlap, the brighter pixel is seen. The task is video object segmentation, as in Duke et
al. 2021, "SSTVOS", arXiv 2101.08833, on DAVIS.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Split
from unrolled.data import mnist
from unrolled.data._base import Task
from unrolled.data._bits import as_batch
from unrolled.data._drawn import DrawnDataset
from unrolled.data._files import read_published
from unrolled.fields import Size

SPEED = (2.0, 5.0)  # pixels from frame to frame
SIDE = 28  # height and width of a digit
BELONGS = 128  # lowest level of a pixel that belongs to the mask


@dataclass
class MovingMnistDataset(DrawnDataset):
    """Videos of moving digits, cut into square patches.

    A token is a patch; patches are in the order of frames, rows and columns. A token has the levels of its
    pixels, from 0 to 1, and then a mask, which is 1 at the pixels of the digit to follow in the first frame,
    and 0 in all later frames. Targets are the masks in the later frames. A video has
    `frames` (size / patch)^2 tokens with patch^2 target bits each. Training videos are drawn from the
    training images of MNIST, validation videos from its test images.

    Attributes:
        frames: frames of a video.
        size: height and width of a frame in pixels.
        patch: height and width of a patch; `size` must be divisible by it.
        n_digits: digits in a video; one of them is to be followed.
        val_size: videos of the validation set.
        data_dir: the folder that holds `mnist/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: an option is impossible, or a file of MNIST is corrupt or missing.
    """

    frames: Annotated[int, Ge(2)] = 8
    size: Annotated[int, Ge(SIDE)] = 64
    patch: Size = 8
    n_digits: Size = 2
    val_size: Size = 200
    data_dir: str | Path | None = None

    task: ClassVar[Task] = "bits"

    @property
    def length(self) -> int:
        """Tokens of a video."""
        return self.frames * (self.size // self.patch) ** 2

    @property
    def input_size(self) -> int:
        """Pixels of a patch, and its mask."""
        return 2 * self.patch**2

    @property
    def output_size(self) -> int:
        """Pixels of a patch."""
        return self.patch**2

    def _check(self) -> None:
        if self.size % self.patch:
            raise ValueError(f"patch is {self.patch}, but must divide size = {self.size}")

    def _open(self) -> None:
        self._digits: dict[Split, np.ndarray] = {
            split: mnist.parse_idx_images(read_published(file, self.data_dir)).numpy()
            for split, file in mnist.FILES.items()
        }

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        return self._videos(rng, count, "train")

    def _draw_validation(self, rng: np.random.Generator) -> Batch:
        return self._videos(rng, self.val_size, "val")

    def _videos(self, rng: np.random.Generator, count: int, split: Split) -> Batch:
        """Draw videos and the mask of the first digit in each."""
        digits = self._digits[split]
        chosen = digits[rng.integers(len(digits), size=(count, self.n_digits))]
        places = self._paths(rng, count)
        video = np.zeros((count, self.frames, self.size, self.size), np.uint8)
        mask = np.zeros(video.shape, bool)
        for (row, digit, frame), (y, x) in zip(
            np.ndindex(places.shape[:3]), places.reshape(-1, 2), strict=True
        ):
            image, window = chosen[row, digit], (row, frame, slice(y, y + SIDE), slice(x, x + SIDE))
            video[window] = np.maximum(video[window], image)
            if digit == 0:
                mask[window] = image >= BELONGS
        given, asked = mask.copy(), mask.astype(np.float32)
        given[:, 1:] = False
        asked[:, 0] = IGNORED
        inputs = np.concatenate([self._patches(video) / 255, self._patches(given)], axis=-1)
        return as_batch(inputs, self._patches(asked))

    def _paths(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw the upper left corner of each digit in each frame: int [count, digits, frames, 2]."""
        room = self.size - SIDE
        shape = (count, self.n_digits, 1)
        angle, speed = rng.uniform(0, 2 * math.pi, shape), rng.uniform(*SPEED, shape)
        velocity = speed[..., None] * np.stack([np.sin(angle), np.cos(angle)], axis=-1)
        straight = rng.uniform(0, room, (*shape, 2)) + velocity * np.arange(self.frames)[:, None]
        folded = np.mod(straight, max(2 * room, 1))
        places: np.ndarray = np.rint(np.minimum(folded, 2 * room - folded)).clip(0).astype(int)
        return places

    def _patches(self, video: np.ndarray) -> np.ndarray:
        """Cut frames into patches: [B, frames, size, size] -> [B, T, patch^2]."""
        side, patch = self.size // self.patch, self.patch
        parts = video.reshape(len(video), self.frames, side, patch, side, patch)
        return parts.swapaxes(3, 4).reshape(len(video), self.length, patch * patch)

    def video(self, patches: Tensor) -> Tensor:
        """Join patches, such as predicted masks, to frames: [B, T, patch^2] -> [B, frames, size, size]."""
        side, patch = self.size // self.patch, self.patch
        parts = patches.reshape(len(patches), self.frames, side, side, patch, patch)
        return torch.swapaxes(parts, 3, 4).reshape(len(patches), self.frames, self.size, self.size)
