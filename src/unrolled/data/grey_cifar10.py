"""The classes of CIFAR-10 from grey images, the image task of the Long Range Arena (arXiv 2011.04006, 2.2.4).

An image is a sequence of 32 x 32 grey levels, row after row; the level of red R, green G and blue B is
0.2989 R + 0.587 G + 0.114 B, rounded. The ten classes are equally frequent.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from unrolled.data._images import LabelledImages
from unrolled.data.cifar10 import read

GREY = (0.2989, 0.587, 0.114)


@dataclass
class GreyCifar10Dataset(LabelledImages):
    """50,000 training images, validated on the 10,000 test images; one of ten labels for each.

    Attributes:
        subset: as for `cifar10`.
        data_dir: the folder that holds `cifar10/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: a file is corrupt, or it is missing and cannot be downloaded.
    """

    subset: bool = False
    data_dir: str | Path | None = None

    length: ClassVar[int] = 32 * 32

    def __post_init__(self) -> None:
        super().__post_init__()
        photographs = read(self.data_dir, subset=self.subset)
        self._examples = {
            split: (grey(images).flatten(1), labels) for split, (images, labels) in photographs.items()
        }


def grey(images: Tensor) -> Tensor:
    """Return the grey levels of colour images: uint8 [..., 3] -> [...]."""
    return (
        torch.stack([weight * images[..., i] for i, weight in enumerate(GREY)]).sum(0).round().to(torch.uint8)
    )
