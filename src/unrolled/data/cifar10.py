"""CIFAR-10: 60,000 colour photographs of 32x32 pixels (Krizhevsky 2009, "Learning Multiple Layers ...")."""

import hashlib
import io
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
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


@dataclass
class Cifar10Dataset(ImageDataset):
    """50,000 training images, validated on the 10,000 test images.

    Red, green and blue of a pixel follow each other, so that an image is a sequence of 3,072 levels.

    Attributes:
        subset: read 5,000 and 1,000 of them, 500 and 100 of each class, from `cifar10_subset.npz`, which must
            be in the folder. Losses on these do not compare with published ones.
        data_dir: the folder that holds `cifar10/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: a file is corrupt, or it is missing and cannot be downloaded.
    """

    subset: bool = False
    data_dir: str | Path | None = None

    vocab_size: ClassVar[int] = 256
    shape: ClassVar[tuple[int, ...]] = SHAPE

    def _read(self) -> dict[Split, Tensor]:
        if not self.subset:
            return load_published([PATH], URL, read_images, self.data_dir)
        path = folder(self.data_dir) / SUBSET
        if not path.is_file():
            raise ValueError(f"subset is True, but {path} is missing: put it there, or use subset=False")
        return read_subset(path)


def read_images(archive: bytes) -> dict[Split, Tensor]:
    """Read the official archive: uint8 [N, 32, 32, 3] of both splits.

    Raises:
        ValueError: it is not the published one.
    """
    found = hashlib.sha256(archive).hexdigest()
    if found != SHA256:
        raise ValueError(f"its content has the sha256 {found} instead of {SHA256}")
    parts = sorted((match[1] or "", content) for match, content in read_archive(archive, PART))
    planes = [
        np.frombuffer(content, np.uint8).reshape(-1, LABEL + 3072)[:, LABEL:].reshape(-1, 3, 32, 32)
        for _, content in parts
    ]
    test, *train = [torch.from_numpy(x.transpose(0, 2, 3, 1).copy()) for x in planes]
    return {"train": torch.cat(train), "val": test}


def read_subset(path: Path) -> dict[Split, Tensor]:
    """Read `x_train` and `x_test` of a file of arrays: uint8 [N, 32, 32, 3] each.

    Raises:
        ValueError: it has no such arrays.
    """
    try:
        with np.load(io.BytesIO(read_file(path))) as arrays:
            images = {split: arrays[name] for split, name in (("train", "x_train"), ("val", "x_test"))}
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    for x in images.values():
        if x.dtype != np.uint8 or x.shape[1:] != SHAPE:
            raise ValueError(
                f"{path} is corrupt: images are {x.dtype} {list(x.shape)}, not uint8 [N, 32, 32, 3]"
            )
    return {"train": torch.from_numpy(images["train"]), "val": torch.from_numpy(images["val"])}
