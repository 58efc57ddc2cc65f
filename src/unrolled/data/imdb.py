"""IMDb: 50,000 film reviews, positive or negative, read as bytes or words (Maas et al. 2011)."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Batch, Split
from unrolled.data._base import Task
from unrolled.data._epochs import EpochDataset
from unrolled.data._files import load_published, read_archive
from unrolled.data._padding import padded
from unrolled.data._tokenizer import TextTokenizer
from unrolled.data._vocabulary import Vocabulary
from unrolled.fields import Fraction, Size

URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
PATHS = ["imdb/aclImdb_v1.tar.gz", "imdb/aclImdb_labelled.tar.xz"]  # the second has labelled reviews only
SHA256 = "547855a64e4712ecaf791b9e6e84adbd8aee292dcf559cba9c7f1852ee7bec3d"  # of the reviews, as hashed below
REVIEW = re.compile(r"(?:.*/)?(train|test)/(pos|neg)/(\d+)_\d+\.txt")
WORDS_KNOWN = 8_000
REVIEWS = 25_000  # of each part
SPLITS: dict[str, Split] = {"train": "train", "test": "val"}

Reviews = dict[Split, list[tuple[int, bytes]]]
"""For each split, label (1 = positive) and text, in the order of label and number."""


@dataclass
class ImdbDataset(EpochDataset):
    """25,000 reviews to train on, validated on the 25,000 of the official test part; one label for each.

    A review is cut off after `length` tokens, as in the Long Range Arena (Tay et al. 2020, arXiv 2011.04006,
    section 2.2.2), whose tokens are bytes. A shorter review is padded at its end to the longest of its batch.
    The validation set is in a fixed random order, so that its first batches are a fair sample.

    Words of the validation reviews can be deleted or inserted at random, which measures how robust a model is
    that was trained on whole reviews. The changes are the same each time.

    Attributes:
        length: maximum number of tokens of a review.
        level: "bytes", or "words", where a sign such as a full stop is a word too.
        vocab_size: for "words", the number of ids: one for each of the most frequent words of the training
            reviews, and one for all other words; by default 8,000. For "bytes", leave it out.
        val_size: number of reviews to validate on, at most 25,000.
        deleted: probability with which each word of a validation review is deleted.
        inserted: probability with which a random word of the same review is inserted before each word that
            was not deleted.
        data_dir: the folder that holds `imdb/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ValueError: the file is corrupt, or it is missing and cannot be downloaded.
    """

    length: Size = 1024
    level: Literal["bytes", "words"] = "bytes"
    vocab_size: Size | None = None
    val_size: Size = REVIEWS
    deleted: Fraction = 0.0
    inserted: Fraction = 0.0
    data_dir: str | Path | None = None

    task: ClassVar[Task] = "labels"
    n_classes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_size > REVIEWS:
            raise ValueError(f"val_size is {self.val_size:,}, but must be at most {REVIEWS:,}")
        self._reviews = load_published(PATHS, URL, read_reviews, self.data_dir)
        order = np.random.default_rng(0).permutation(len(self._reviews["val"]))
        self._reviews["val"] = [self._edited(int(i)) for i in order[: self.val_size]]
        self.text_tokenizer: TextTokenizer | None = None
        if self.level == "words":
            texts = (_text(review) for _, review in self._reviews["train"])
            self.text_tokenizer = TextTokenizer.learn_words(texts, vocab_size=self.vocab_size or WORDS_KNOWN)
        elif self.vocab_size not in (None, 256):
            raise ValueError(f"vocab_size is {self.vocab_size}, but must be left out with level='bytes'")
        self.vocab_size = 256 if self.text_tokenizer is None else len(self.text_tokenizer)

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes or words."""
        if self.text_tokenizer is None:
            return super().vocabulary
        return Vocabulary("tokenizer", tokenizer=self.text_tokenizer.to_json(), data=self.name)

    def _edited(self, review: int) -> tuple[int, bytes]:
        """Return the label and the text of a validation review, with words deleted and inserted."""
        label, text = self._reviews["val"][review]
        if not (self.deleted or self.inserted):
            return label, text
        rng = np.random.default_rng((0, review))
        words = text.split(b" ")
        kept = [
            word for word, draw in zip(words, rng.random(len(words)), strict=True) if draw >= self.deleted
        ]
        put = rng.random(len(kept)) < self.inserted
        drawn = rng.integers(len(words), size=len(kept))
        pairs = ([words[i], word] if new else [word] for word, new, i in zip(kept, put, drawn, strict=True))
        return label, b" ".join(word for pair in pairs for word in pair)

    def _count(self, split: Split) -> int:
        return len(self._reviews[split])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        reviews = [self._reviews[split][i] for i in rows]
        inputs, padding = padded([self._ids(review)[: self.length] for _, review in reviews])
        return Batch(inputs, torch.tensor([label for label, _ in reviews]), padding)

    def _ids(self, review: bytes) -> Sequence[int]:
        return review if self.text_tokenizer is None else self.text_tokenizer.encode_piece(_text(review))


def _text(review: bytes) -> str:
    return review.decode(errors="replace")


def read_reviews(archive: bytes) -> Reviews:
    """Read the labelled reviews of a tar archive, however it is compressed.

    Raises:
        ValueError: `archive` is not a tar archive, or the reviews are not those that were published.
    """
    found = {(match[1], match[2], int(match[3])): text for match, text in read_archive(archive, REVIEW)}
    digest = hashlib.sha256()
    reviews: Reviews = {"train": [], "val": []}
    for key in sorted(found):
        digest.update(f"{key} {len(found[key])}\n".encode() + found[key])
        reviews[SPLITS[key[0]]].append((int(key[1] == "pos"), found[key]))
    if digest.hexdigest() != SHA256:
        raise ValueError(
            f"its {len(found):,} labelled reviews have the sha256 {digest.hexdigest()} instead of {SHA256}"
        )
    return reviews
