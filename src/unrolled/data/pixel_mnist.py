"""Classify an image of MNIST that is read pixel by pixel, optionally in a permuted order.

Le, Jaitly and Hinton 2015, "A Simple Way to Initialize Recurrent Networks of Rectified Linear Units", arXiv
1504.00941, section 4.2. The permutation is drawn once, and is the same for all images. In this order, pixels
that are near in the sequence are not near in the image.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from unrolled.data import mnist
from unrolled.data._files import read_published
from unrolled.data._images import LabelledImages


@dataclass
class PixelMnistDataset(LabelledImages):
    """60,000 training images, validated on the 10,000 test images, as sequences of 784 grey levels.

    Attributes:
        permuted: read the pixels of every image in the same random order, instead of row by row.
        data_dir: the folder that holds `mnist/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: a file is corrupt, or it is missing and cannot be downloaded.
    """

    permuted: bool = False
    data_dir: str | Path | None = None

    length: ClassVar[int] = 28 * 28

    def __post_init__(self) -> None:
        super().__post_init__()
        order = torch.arange(self.length)
        if self.permuted:
            order = torch.from_numpy(np.random.default_rng(0).permutation(self.length))
        self._examples = {
            split: (
                mnist.parse_idx_images(read_published(mnist.FILES[split], self.data_dir)).flatten(1)[
                    :, order
                ],
                mnist.parse_idx_labels(read_published(mnist.LABEL_FILES[split], self.data_dir)),
            )
            for split in mnist.FILES
        }
