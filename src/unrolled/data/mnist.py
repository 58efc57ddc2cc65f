"""MNIST: 70,000 handwritten digits of 28x28 pixels and 256 grey levels (LeCun, Cortes and Burges 1998)."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Split
from unrolled.data._files import PublishedFile, read_published
from unrolled.data._images import ImageDataset

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"  # the authors' own page no longer serves the files


def _images(part: str, sha256: str) -> PublishedFile:
    name = f"{part}-images-idx3-ubyte.gz"
    return PublishedFile(f"mnist/{name}", f"{MIRROR}/{name}", sha256)


FILES: dict[Split, PublishedFile] = {
    "train": _images("train", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "val": _images("t10k", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
}
IMAGES_MAGIC = 0x0803  # unsigned bytes in three dimensions


@dataclass
class MnistDataset(ImageDataset):
    """The 60,000 training images, validated on the 10,000 test images.

    Attributes:
        data_dir: the folder that holds `mnist/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: a file is corrupt, or it is missing and cannot be downloaded.
    """

    data_dir: str | Path | None = None

    vocab_size: ClassVar[int] = 256
    shape: ClassVar[tuple[int, ...]] = (28, 28)

    def _read(self) -> dict[Split, Tensor]:
        return {split: parse_idx_images(read_published(file, self.data_dir)) for split, file in FILES.items()}


def parse_idx_images(content: bytes) -> Tensor:
    """Read images in the idx format: magic, N, H, W as big-endian int32, then N H W bytes; uint8 [N, H, W].

    Raises:
        ValueError: the content is not in this format, or has too few or too many bytes.
    """
    header = struct.Struct(">4I")
    if len(content) < header.size:
        raise ValueError(f"the idx content has {len(content)} bytes, fewer than its header of {header.size}")
    magic, *shape = header.unpack_from(content)
    if magic != IMAGES_MAGIC:
        raise ValueError(
            f"the idx content starts with {magic:#010x}, but images start with {IMAGES_MAGIC:#010x}"
        )
    found, announced = len(content) - header.size, math.prod(shape)
    if found != announced:
        raise ValueError(
            f"the idx content has {found} pixels, but its header {tuple(shape)} announces {announced}"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header.size).reshape(shape).copy())
