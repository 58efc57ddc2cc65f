"""Do two texts belong together? A substitute for the retrieval task of the Long Range Arena.

In the Long Range Arena, two papers of the ACL Anthology Network are compared, and the label says whether one
cites the other (arXiv 2011.04006, section 2.2.3). Here, each text is one half of an IMDb review, and the
label says whether the second text continues the first. Accuracies cannot be compared with published ones.

    bytes of the first text, separator, bytes of the second text  ->  1 if both are of one review, else 0
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Batch, Split
from unrolled.data import imdb
from unrolled.data._base import Task
from unrolled.data._epochs import EpochDataset
from unrolled.data._files import load_published
from unrolled.data._padding import padded
from unrolled.fields import Size

SEPARATOR = 256


@dataclass
class RetrievalDataset(EpochDataset):
    """25,000 pairs of half reviews to train on, validated on 25,000 pairs of the test part.

    Each review of a split gives one first half. A random half of the first halves come with the second half
    of the same review, the others with the second half of another review of their split. Of each text, only
    the `text_length` bytes next to the middle of its review are read. Lengths do not give the label away: the
    other review is about as long, and both texts are cut to the length of the shorter one. An example is
    padded at its end to the longest of its batch.

    Attributes:
        text_length: maximum number of bytes of each text.
        data_dir: the folder that holds `imdb/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: the file is corrupt, or it is missing and cannot be downloaded.
    """

    text_length: Size = 1024
    data_dir: str | Path | None = None

    task: ClassVar[Task] = "labels"
    vocab_size: ClassVar[int] = 257
    n_classes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        reviews = load_published(imdb.PATHS, imdb.URL, imdb.read_reviews, self.data_dir)
        self._texts = {split: [text for _, text in found] for split, found in reviews.items()}
        self._partners = {
            split: partners(np.array([len(text) for text in texts]), split)
            for split, texts in self._texts.items()
        }

    @property
    def length(self) -> int:
        """Both texts and the separator."""
        return 2 * self.text_length + 1

    def _count(self, split: Split) -> int:
        return len(self._texts[split])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        texts, (own, partner) = self._texts[split], self._partners[split]
        joined = []
        for i in rows.tolist():
            first, second = texts[own[i]], texts[partner[i]]
            end, begin = len(first) // 2, len(second) // 2
            n = min(end, begin, self.text_length)
            joined.append([*first[end - n : end], SEPARATOR, *second[begin : begin + n]])
        inputs, padding = padded(joined)
        same = torch.from_numpy(own == partner)[rows]
        return Batch(inputs, same.long(), padding)


def partners(lengths: np.ndarray, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return the reviews that give the first and the second half of each example, in a fixed random order.

    A second half of another review comes from the next longer one, so that each is used once.
    """
    rng = np.random.default_rng((0, split == "val"))
    own = rng.permutation(len(lengths))
    partner = own.copy()
    others = own[: len(lengths) // 2]
    others[:] = others[np.argsort(lengths[others], kind="stable")]  # in `own` too
    partner[: len(others)] = np.roll(others, -1)
    order = rng.permutation(len(lengths))
    return own[order], partner[order]
