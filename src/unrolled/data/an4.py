"""AN4: people of Pittsburgh spell names and say numbers and dates, 948 + 130 utterances (CMU 1991).

The recordings, 16 kHz and 48 minutes in all, come with the phones of every word.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import Batch, Split
from unrolled.data._base import Task
from unrolled.data._checks import check_request
from unrolled.data._epochs import EpochDataset, epoch_rows_by_length
from unrolled.data._files import load_published, read_archive
from unrolled.data._sound import Samples, log_mel, read_sound
from unrolled.data._speech import Utterance, as_batch, hide
from unrolled.data._vocabulary import Vocabulary
from unrolled.fields import Count, Size

RATE = 16_000
URL = "http://www.speech.cs.cmu.edu/databases/an4/an4_sphere.tar.gz"
PATHS = ["an4/an4_sphere.tar.gz", "an4/an4_flac.tar"]  # the second has the same samples in other files
SHA256 = "7429e4d8c8c5b411c51246d7ae7b7854eb5caee3b9b29f91ce37482d58d85b02"  # as hashed below
MEMBER = re.compile(r"(?:\./)?an4/(etc/an4\.dic|etc/an4_(?:train|test)\.\w+|wav/(.*)\.(?:flac|sph))")
SPLITS: dict[Split, str] = {"train": "train", "val": "test"}
BESIDE_WORDS = re.compile(r"\(.*\)|</?s>")  # in a line of transcripts: the name of the file, start and end
POOL = 64  # batches that are sorted by length together

Units = Literal["phones", "letters"]
Spoken = tuple[Samples, list[str]]
"""Samples and words of an utterance."""


@dataclass
class An4Dataset(EpochDataset):
    """The 948 utterances of the official training part, validated on the 130 of its test part.

    The utterances of a training batch have similar lengths. Random bars of them are hidden, over time and
    over frequency.

    Attributes:
        units: what to predict: "phones", from the first pronunciation of each word in the dictionary, or
            "letters", with spaces between words.
        n_mels: features of a frame.
        masks: number of bars over time, and of bars over frequency, that are hidden in each training
            utterance; see `unrolled.data._speech.hide`.
        data_dir: the folder that holds `an4/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ImportError: a library of the extra `speech` is not installed.
        ValueError: the file is corrupt, or it is missing and cannot be downloaded.
    """

    units: Units = "phones"
    n_mels: Size = 40
    masks: Count = 2
    data_dir: str | Path | None = None

    task: ClassVar[Task] = "transcription"
    recipe: ClassVar[str] = "speech"

    def __post_init__(self) -> None:
        super().__post_init__()
        spoken, phones = load_published(PATHS, URL, read_an4, self.data_dir)
        written = {
            split: [
                " ".join(words) if self.units == "letters" else phones_of(words, phones) for _, words in x
            ]
            for split, x in spoken.items()
        }
        self._names = sorted({name for lines in written.values() for line in lines for name in line})
        number = {name: i for i, name in enumerate(self._names)}
        self._utterances = {
            split: [
                Utterance(log_mel(samples, RATE, self.n_mels), torch.tensor([number[name] for name in line]))
                for (samples, _), line in zip(spoken[split], written[split], strict=True)
            ]
            for split in SPLITS
        }
        self._lengths = np.array([len(x.features) for x in self._utterances["train"]])

    @property
    def vocab_size(self) -> int:
        """Number of phones or letters."""
        return len(self._names)

    @property
    def vocabulary(self) -> Vocabulary:
        """The phones or letters, and the sampling rate and the size of the features."""
        counted: Literal["phone", "word"] = "phone" if self.units == "phones" else "word"
        return Vocabulary(
            "speech",
            units=self._names,
            rate=RATE,
            n_mels=self.n_mels,
            counted=counted,
            data=self.name,
        )

    def _count(self, split: Split) -> int:
        return len(self._utterances[split])

    def _rows(self, split: Split, rows: Tensor) -> Batch:
        return as_batch([self._utterances[split][i] for i in rows])

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return batch number `step` of the epochs drawn from `seed`; for training, with hidden bars."""
        if split != "train":
            return super().batch(split, step=step, batch_size=batch_size, seed=seed)
        check_request(split, step, batch_size, seed)
        rows = epoch_rows_by_length(
            self._lengths[None], step=step, batch_size=batch_size, seed=seed, pool=POOL
        )
        return hide(self._rows(split, rows), np.random.default_rng((seed, step, 2)), self.masks)


def phones_of(words: list[str], phones: dict[str, list[str]]) -> list[str]:
    """Return the phones of words, one after the other."""
    return [phone for word in words for phone in phones[word]]


def read_an4(archive: bytes) -> tuple[dict[Split, list[Spoken]], dict[str, list[str]]]:
    """Read a tar archive: the utterances of both splits in their published order, and the phones of words.

    Raises:
        ValueError: `archive` is not a tar archive, or its content is not what was published.
    """
    digest, texts, sounds = hashlib.sha256(), {}, {}
    for match, content in read_archive(archive, MEMBER):
        if match[2]:
            sounds[match[2]] = content
        else:
            texts[match[1].removeprefix("etc/")] = content.decode("ascii", "replace")
    entries = [line.split() for line in texts.get("an4.dic", "").splitlines()]
    phones = {word: names for word, *names in entries if "(" not in word}  # A(2) is a second pronunciation
    spoken: dict[Split, list[Spoken]] = {"train": [], "val": []}
    for split, name in SPLITS.items():
        files = texts.get(f"an4_{name}.fileids", "").split()
        lines = texts.get(f"an4_{name}.transcription", "").splitlines()
        for file, line in zip(files, lines, strict=False):
            if file not in sounds:
                raise ValueError(f"it lacks the recording {file}")
            words = BESIDE_WORDS.sub(" ", line).split()
            samples = read_sound(sounds[file], RATE)
            digest.update(
                f"{file} {words} {[phones.get(word) for word in words]}".encode() + samples.tobytes()
            )
            spoken[split].append((samples, words))
    if digest.hexdigest() != SHA256:
        count = sum(map(len, spoken.values()))
        raise ValueError(f"its {count:,} utterances have the sha256 {digest.hexdigest()} instead of {SHA256}")
    return spoken, phones
