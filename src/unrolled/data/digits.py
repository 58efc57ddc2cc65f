"""The 1,797 handwritten digits of 8x8 pixels and 17 grey levels that scikit-learn includes.

They are the test part of Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Split
from unrolled.data._images import ImageDataset
from unrolled.extras import how_to_install

TRAIN_SIZE = 1_500


@dataclass
class DigitsDataset(ImageDataset):
    """1,500 digits to train on and 297 to validate, in a fixed random split.

    Raises:
        ImportError: scikit-learn is not installed.
    """

    vocab_size: ClassVar[int] = 17
    shape: ClassVar[tuple[int, ...]] = (8, 8)

    def _read(self) -> dict[Split, Tensor]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                f"the digits come with scikit-learn, which is not installed: {how_to_install('demo')}"
            ) from error
        images = torch.from_numpy(load_digits().images.astype(np.uint8))
        # A random split, since the order of the file may follow the people who wrote the digits.
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
        return {"train": images[order[:TRAIN_SIZE]], "val": images[order[TRAIN_SIZE:]]}
