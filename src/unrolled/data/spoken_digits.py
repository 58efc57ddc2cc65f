"""Spoken digits: several recordings of the Free Spoken Digit Dataset, one after the other (Jackson 2016).

The dataset has 3,000 recordings at 8 kHz of six people who say the digits from zero to nine in English, each
50 times. Recordings 5 to 49 are for training and 0 to 4 for testing. The licence is CC BY-SA 4.0.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from unrolled.contract import Batch, Split
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset
from unrolled.data._files import load_published, read_archive
from unrolled.data._sound import Samples, log_mel, read_sound
from unrolled.data._speech import Utterance, as_batch, hide
from unrolled.data._vocabulary import Vocabulary
from unrolled.fields import Count, Size

RATE = 8_000
URL = "https://github.com/Jakobovski/free-spoken-digit-dataset/archive/refs/tags/v1.0.10.tar.gz"
PATHS = ["fsdd/free-spoken-digit-dataset-1.0.10.tar.gz", "fsdd/fsdd_recordings.tar.xz"]
SHA256 = "bbeac7f1e71e7b5890a66d12bb2ed5202856f2ac984eb5f8aedac09e53d52558"  # of names and samples
MEMBER = re.compile(r"(?:.*/)?recordings/(\d)_(\w+)_(\d+)\.wav")
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TESTED = 5  # recordings of a digit and a speaker that are for testing
PAUSE = (0.05, 0.3)  # seconds between two digits

Recordings = dict[str, list[list[Samples]]]
"""For each speaker, the recordings of each digit."""


@dataclass
class SpokenDigitsDataset(DrawnDataset):
    """Unlimited random training utterances, and a fixed validation set made of other recordings.

    An utterance has 1 to `most` digits of one speaker, with pauses of 0.05 to 0.3 seconds; every number of
    digits is equally frequent. Random bars of training utterances are hidden, over time and over frequency.

    Attributes:
        most: maximum number of digits of an utterance.
        n_mels: features of a frame.
        masks: number of bars over time, and of bars over frequency, that are hidden in each training
            utterance; see `unrolled.data._speech.hide`.
        val_size: utterances of the validation set.
        data_dir: the folder that holds `fsdd/`; default `$UNROLLED_DATA`, else `~/.cache/unrolled`.

    Raises:
        ImportError: a library of the extra `speech` is not installed.
        ValueError: the file is corrupt, or it is missing and cannot be downloaded.
    """

    most: Size = 7
    n_mels: Size = 40
    masks: Count = 1
    val_size: Size = 300
    data_dir: str | Path | None = None

    task: ClassVar[Task] = "transcription"
    recipe: ClassVar[str] = "speech"
    vocab_size: ClassVar[int] = len(WORDS)

    def _open(self) -> None:
        self._recordings = load_published(PATHS, URL, read_recordings, self.data_dir)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of the digits, and the sampling rate and the size of the features."""
        return Vocabulary(
            "speech", units=WORDS, rate=RATE, n_mels=self.n_mels, counted="word", data=self.name
        )

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        return hide(self._utterances("train", rng, count), rng, self.masks)

    def _draw_validation(self, rng: np.random.Generator) -> Batch:
        return self._utterances("val", rng, self.val_size)

    def _utterances(self, split: Split, rng: np.random.Generator, count: int) -> Batch:
        return as_batch([self._utterance(split, rng) for _ in range(count)])

    def _utterance(self, split: Split, rng: np.random.Generator) -> Utterance:
        of_digits = self._recordings[rng.choice(list(self._recordings))]
        digits = rng.integers(10, size=rng.integers(1, self.most + 1))
        sounds: list[Samples] = []
        for digit in digits:
            takes = of_digits[digit][:TESTED] if split == "val" else of_digits[digit][TESTED:]
            pause = np.zeros(int(rng.uniform(*PAUSE) * RATE), np.int16)
            sounds += [takes[rng.integers(len(takes))], pause]
        return Utterance(log_mel(np.concatenate(sounds[:-1]), RATE, self.n_mels), torch.from_numpy(digits))


def read_recordings(archive: bytes) -> Recordings:
    """Read a tar archive of the recordings, however it is compressed.

    Raises:
        ValueError: `archive` is not a tar archive, or its recordings are not those that were published.
    """
    files = {(match[2], int(match[1]), int(match[3])): x for match, x in read_archive(archive, MEMBER)}
    digest, found = hashlib.sha256(), dict[str, list[list[Samples]]]()
    for speaker, digit, take in sorted(files):
        samples = read_sound(files[speaker, digit, take], RATE)
        digest.update(f"{speaker} {digit} {take}".encode() + samples.tobytes())
        found.setdefault(speaker, [[] for _ in WORDS])[digit].append(samples)
    if digest.hexdigest() != SHA256:
        raise ValueError(f"its {len(files):,} recordings have the sha256 {digest.hexdigest()}, not {SHA256}")
    return found
