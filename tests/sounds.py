"""Small files of sound, and data sets of speech in their published formats."""

import hashlib
import io
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from published import tar

from unrolled.data import an4, spoken_digits

PHONES = {"ONE": "W AH N", "TWO": "T UW", "NO": "N OW", "OH": "OW", "ENTER": "EH N T ER"}
LINES = {"train": ["ONE TWO", "NO", "TWO TWO OH", "ENTER ONE NO", "OH", "NO NO"], "test": ["TWO NO", "ONE"]}


def tone(hertz: float, seconds: float, rate: int = 16_000, loudness: float = 8_000) -> np.ndarray:
    """A sine of one frequency, int16."""
    return (loudness * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.int16)


def write_wave(path: Path, channels: Sequence[np.ndarray], rate: int = 16_000) -> Path:
    """Write channels, int16 of equal length, as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.stack(channels, axis=1).astype("<i2").tobytes())
    return path


def spoken(word: str, rate: int) -> np.ndarray:
    """A stand-in for a word: a tone for each letter."""
    return np.concatenate([tone(200 + 60 * (ord(letter) % 32), 0.15, rate) for letter in word])


def content(samples: np.ndarray, rate: int, kind: str) -> bytes:
    """Return a file of sound, "WAV" or "FLAC"."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype="PCM_16")
    return file.getvalue()


def an4_files() -> dict[str, bytes]:
    """The files of a small AN4: six utterances to train on, and two to test."""
    files = {"an4/README": b"about"}
    dictionary = "".join(f"{word}\t{phones}\n" for word, phones in PHONES.items()) + "OH(2)\tAH\n"
    files["an4/etc/an4.dic"] = dictionary.encode()
    for part, lines in LINES.items():
        names = [f"an4{part}_clstk/me/{part}{i}" for i in range(len(lines))]
        mark = "<s> {} </s> ({})" if part == "train" else "{} ({})"
        said = [mark.format(line, Path(name).name) for line, name in zip(lines, names, strict=True)]
        files[f"an4/etc/an4_{part}.fileids"] = "\n".join(names).encode()
        files[f"an4/etc/an4_{part}.transcription"] = "\n".join(said).encode()
        for name, line in zip(names, lines, strict=True):
            samples = np.concatenate([spoken(word, an4.RATE) for word in line.split()])
            files[f"an4/wav/{name}.flac"] = content(samples, an4.RATE, "FLAC")
    return files


def write_an4(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small AN4 below a folder, and make its checksum the published one."""
    digest = hashlib.sha256()
    for part, lines in LINES.items():
        for i, line in enumerate(lines):
            phones = [PHONES[word].split() for word in line.split()]
            samples = np.concatenate([spoken(word, an4.RATE) for word in line.split()])
            said = f"an4{part}_clstk/me/{part}{i} {line.split()} {phones}"
            digest.update(said.encode() + samples.tobytes())
    monkeypatch.setattr(an4, "SHA256", digest.hexdigest())
    (root / "an4").mkdir()
    (root / "an4/an4_flac.tar").write_bytes(tar(an4_files(), "w"))
    return root


def write_digits(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write recordings of two speakers below a folder, and make their checksum the published one."""
    files, digest = {}, hashlib.sha256()
    for speaker in ("ann", "bob"):
        for digit, word in enumerate(spoken_digits.WORDS):
            for take in range(7):
                samples = spoken(word, spoken_digits.RATE) // (take + 1)
                digest.update(f"{speaker} {digit} {take}".encode() + samples.tobytes())
                name = f"recordings/{digit}_{speaker}_{take}.wav"
                files[name] = content(samples, spoken_digits.RATE, "WAV")
    monkeypatch.setattr(spoken_digits, "SHA256", digest.hexdigest())
    (root / "fsdd").mkdir()
    (root / "fsdd/fsdd_recordings.tar.xz").write_bytes(tar(files, "w:xz"))
    return root
