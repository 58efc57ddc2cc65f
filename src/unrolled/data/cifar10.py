"""CIFAR-10: 60,000 colour photographs of 32x32 pixels (Krizhevsky 2009, "Learning Multiple Layers ...")."""

import hashlib
import io
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unrolled.contract import Split
from unrolled.data._files import folder, load_published, read_archive, read_file
from unrolled.data._images import ImageDataset

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PATH = "cifar10/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
SUBSET = "cifar10/cifar10_subset.npz"
PART = re.compile(r"(?:.*/)?(?:data_batch_(\d)|test_batch)\.bin")
SHAPE = (32, 32, 3)
LABEL = 1  # bytes before the 3,072 of an image, which has its red, green and blue plane one after the other

Photographs = dict[Split, tuple[Tensor, Tensor]]
"""For each split, the images, uint8 [N, 32, 32, 3], and their classes, int64 [N]."""


@dataclass
class Cifar10Dataset(ImageDataset):
    """50,000 training images, validated on the 10,000 test images.

    Red, green and blue of a pixel follow each other, so that an image is a sequence of 3,072 levels.

    Attributes:
        subset: read only 5,000 training and 1,000 test images (500 and 100 of each class) from
            `cifar10_subset.npz`, which must be in the folder. Losses on this subset cannot be compared with
            published ones.
        data_dir: the folder that holds `cifar10/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: a file is corrupt, or it is missing and cannot be downloaded.
    """

    subset: bool = False
    data_dir: str | Path | None = None

    vocab_size: ClassVar[int] = 256
    shape: ClassVar[tuple[int, ...]] = SHAPE

    def _read(self) -> dict[Split, Tensor]:
        found = read(self.data_dir, subset=self.subset)
        return {split: images for split, (images, _) in found.items()}


def read(data_dir: str | Path | None, *, subset: bool) -> Photographs:
    """Read all photographs, downloading them once if they are missing, or the file of a subset.

    Raises:
        ValueError: a file is corrupt, or it is missing and cannot be downloaded.
    """
    if not subset:
        return load_published([PATH], URL, read_archive_of_all, data_dir)
    path = folder(data_dir) / SUBSET
    if not path.is_file():
        raise ValueError(f"subset is True, but {path} is missing: put it there, or use subset=False")
    return read_subset(path)


def read_archive_of_all(archive: bytes) -> Photographs:
    """Read the official archive.

    Raises:
        ValueError: `archive` is not the published one.
    """
    found = hashlib.sha256(archive).hexdigest()
    if found != SHA256:
        raise ValueError(f"its content has the sha256 {found} instead of {SHA256}")
    parts = sorted((match[1] or "", content) for match, content in read_archive(archive, PART))
    test, *train = [np.frombuffer(content, np.uint8).reshape(-1, LABEL + 3072) for _, content in parts]

    def split(rows: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        images = rows[:, LABEL:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return torch.from_numpy(images.copy()), torch.from_numpy(rows[:, 0].astype(np.int64))

    return {"train": split(np.concatenate(train)), "val": split(test)}


def read_subset(path: Path) -> Photographs:
    """Read the arrays `x_train`, `y_train`, `x_test` and `y_test` of a file.

    Raises:
        ValueError: the file has no such arrays.
    """
    try:
        with np.load(io.BytesIO(read_file(path))) as arrays:
            found = {part: (arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")}
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    for x, y in found.values():
        if x.dtype != np.uint8 or x.shape[1:] != SHAPE or y.shape != x.shape[:1]:
            raise ValueError(
                f"{path} is corrupt: images are {x.dtype} {list(x.shape)} and labels {list(y.shape)}, but "
                "must be uint8 [N, 32, 32, 3] and [N]"
            )
    train, test = [(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))) for x, y in found.values()]
    return {"train": train, "val": test}
