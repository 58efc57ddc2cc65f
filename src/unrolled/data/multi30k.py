"""Multi30k: 31,014 captions of photographs in English and German (Elliott et al. 2016, arXiv 1605.00459).

The files are those of github.com/multi30k/dataset, task 1, neither tokenised nor lower-cased. They derive
from Flickr30k, and have its terms: for research and education, not for commercial use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from unrolled.contract import IGNORED, Batch, Split
from unrolled.data._base import Task
from unrolled.data._bpe import END_ID, SMALLEST, BytePairs
from unrolled.data._checks import check_request
from unrolled.data._epochs import EpochDataset, epoch_rows_by_length
from unrolled.data._files import PublishedFile, read_published
from unrolled.data._vocabulary import Vocabulary
from unrolled.ops.masks import padding_mask

Direction = Literal["en-de", "de-en"]
URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
SHA256 = {
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2017_flickr.de": "c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081",
    "test_2017_flickr.en": "ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98",
    "test_2017_mscoco.de": "58277df3c75f92f7145a11b910b553d1cf82c439249d4dc237c899609eafac22",
    "test_2017_mscoco.en": "43051fdfa86fd5395182e718a94ca67b1b227b9f7c79596ff0f6b813216981d2",
}
PARTS = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
POOL = 64  # batches that are sorted by length together

Pairs = list[tuple[Tensor, Tensor]]  # ids of source and target, each with the end symbol


@dataclass
class Multi30kDataset(EpochDataset):
    """29,000 pairs of sentences to train on and 1,014 to validate, as byte pairs that both languages share.

    The byte pairs are learned from the training text. The sentences of a training batch have similar lengths:
    the pairs of `POOL` random batches of an epoch are sorted by length and cut into batches again, and these
    batches are shuffled. Each epoch has every pair once.

    Attributes:
        direction: "en-de" translates into German, "de-en" into English.
        vocab_size: number of ids, including the end symbol, which is 0.
        length: maximum number of tokens of a sentence, including the end symbol; training pairs with a longer
            sentence are left out, but validation pairs are not.
        joined: number of consecutive pairs that are joined to one example, for longer sentences. Pairs at the
            end that do not fill an example are left out. Byte pairs are learned from single sentences.
        data_dir: the folder that holds `multi30k/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ImportError: the library `tokenizers` is not installed.
        ValueError: an option is impossible, or a file is corrupt, or missing and cannot be downloaded.
    """

    direction: Direction = "en-de"
    vocab_size: Annotated[int, Ge(SMALLEST)] = 8_000
    length: Annotated[int, Ge(2)] = 128
    joined: Annotated[int, Ge(1)] = 1
    data_dir: str | Path | None = None

    task: ClassVar[Task] = "translation"
    source_vocab_size: ClassVar[None] = None
    stop: ClassVar[int] = END_ID

    def __post_init__(self) -> None:
        super().__post_init__()
        texts: dict[Split, tuple[list[str], list[str]]] = {
            split: self.sentences(split) for split in get_args(Split)
        }
        source, target = self._read("train")
        self.pieces = BytePairs.learn([*source, *target], self.vocab_size)
        self._pairs: dict[Split, Pairs] = {
            split: list(zip(*map(self.pieces.encode_all, sides), strict=True))
            for split, sides in texts.items()
        }
        train = self._pairs["train"]
        self._pairs["train"] = [pair for pair in train if max(map(len, pair)) <= self.length]
        if not self._pairs["train"]:
            raise ValueError(f"length is {self.length}, but every training pair has more tokens")
        self._lengths = {
            split: np.array([[len(side) for side in sides] for sides in zip(*pairs, strict=True)])
            for split, pairs in self._pairs.items()
        }

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sentence to train on or to validate, including the end symbol."""
        return max(self.length, int(self._lengths["val"].max()))

    @property
    def vocabulary(self) -> Vocabulary:
        """The byte pairs."""
        return Vocabulary("bpe", pieces=self.pieces.to_json(), data=self.name)

    def sentences(self, part: str) -> tuple[list[str], list[str]]:
        """Return the sentences of a part in `PARTS`, `joined` at a time, and their translations.

        Raises:
            ValueError: there is no such part, or it has fewer than `joined` sentences, or a file is corrupt,
                or missing and cannot be downloaded.
        """
        source, target = self._read(part)
        if len(source) < self.joined:
            raise ValueError(f"joined is {self.joined}, but {part} has only {len(source)} sentences")
        return join(source, self.joined), join(target, self.joined)

    def _read(self, part: str) -> tuple[list[str], list[str]]:
        if part not in PARTS:
            raise ValueError(f"part is {part!r}, but the parts are {', '.join(PARTS)}")
        source, target = (
            read_sentences(f"{part}.{language}", self.data_dir) for language in self.direction.split("-")
        )
        if len(source) != len(target):
            raise ValueError(f"{part} has {len(source)} sentences, but {len(target)} translations")
        return source, target

    def encode(self, text: str) -> Tensor:
        """Return the ids of a sentence in either language, with the end symbol, int64 [T]."""
        return self.pieces.encode(text)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [T], up to the end symbol."""
        return self.pieces.decode(ids)

    def _count(self, split: Split) -> int:
        return len(self._pairs[split])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        return as_batch([self._pairs[split][i] for i in rows])

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return batch number `step` of the epochs drawn from `seed`, of pairs of about one length."""
        check_request(split, step, batch_size, seed)
        lengths = self._lengths[split]  # sorted by the target first, whose tokens cost most
        rows = epoch_rows_by_length(lengths, step=step, batch_size=batch_size, seed=seed, pool=POOL)
        return self._rows(split, rows)


def as_batch(pairs: Pairs) -> Batch:
    """Make a batch of pairs of ids; each side is padded at its end to the longest."""
    sources, targets = zip(*pairs, strict=True)
    lengths = torch.tensor([len(source) for source in sources])
    inputs = torch.nn.utils.rnn.pad_sequence(list(sources), batch_first=True, padding_value=END_ID)
    labels = torch.nn.utils.rnn.pad_sequence(list(targets), batch_first=True, padding_value=IGNORED)
    return Batch(inputs, labels, padding_mask(lengths))


def join(sentences: Sequence[str], n: int) -> list[str]:
    """Join every n consecutive sentences by spaces; fewer than n at the end are left out."""
    return [" ".join(sentences[i : i + n]) for i in range(0, len(sentences) - n + 1, n)]


def read_sentences(name: str, data_dir: str | Path | None) -> list[str]:
    """Return the lines of a file such as "train.en"."""
    file = PublishedFile(f"multi30k/{name}.gz", f"{URL}/{name}.gz", SHA256[name])
    return read_published(file, data_dir).decode().removesuffix("\n").split("\n")
