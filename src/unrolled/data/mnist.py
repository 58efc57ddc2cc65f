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


def _file(name: str, sha256: str) -> PublishedFile:
    return PublishedFile(f"mnist/{name}", f"{MIRROR}/{name}", sha256)


FILES: dict[Split, PublishedFile] = {
    "train": _file(
        "train-images-idx3-ubyte.gz", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    ),
    "val": _file(
        "t10k-images-idx3-ubyte.gz", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
    ),
}
LABEL_FILES: dict[Split, PublishedFile] = {
    "train": _file(
        "train-labels-idx1-ubyte.gz", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    "val": _file(
        "t10k-labels-idx1-ubyte.gz", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
    ),
}
MAGIC = {1: 0x0801, 3: 0x0803}
"""Number that starts a file of unsigned bytes, by its number of dimensions."""


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
    return _parse_idx(content, 3, "images", "pixels")


def parse_idx_labels(content: bytes) -> Tensor:
    """Read labels in the idx format: magic and N as big-endian int32, then N bytes; uint8 [N].

    Raises:
        ValueError: as for `parse_idx_images`.
    """
    return _parse_idx(content, 1, "labels", "labels")


def _parse_idx(content: bytes, dimensions: int, name: str, items: str) -> Tensor:
    header = struct.Struct(f">{1 + dimensions}I")
    if len(content) < header.size:
        raise ValueError(f"the idx content has {len(content)} bytes, fewer than its header of {header.size}")
    magic, *shape = header.unpack_from(content)
    if magic != MAGIC[dimensions]:
        raise ValueError(
            f"the idx content starts with {magic:#010x}, but {name} start with {MAGIC[dimensions]:#010x}"
        )
    found, announced = len(content) - header.size, math.prod(shape)
    if found != announced:
        raise ValueError(
            f"the idx content has {found} {items}, but its header {tuple(shape)} announces {announced}"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header.size).reshape(shape).copy())
