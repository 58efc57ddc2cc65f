"""Small files in the formats of published data sets, which pass for the real ones."""

import gzip
import hashlib
import io
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from unrolled.data import babi, cifar10, imdb, mnist
from unrolled.data._files import PublishedFile

Examples = dict[str, tuple[np.ndarray, np.ndarray]]


def tar(files: Mapping[str, bytes], mode: str) -> bytes:
    """Return a tar archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def idx_images(images: np.ndarray, magic: int = 0x0803) -> bytes:
    return struct.pack(">4I", magic, *images.shape) + images.astype(np.uint8).tobytes()


def idx_labels(labels: np.ndarray, magic: int = 0x0801) -> bytes:
    return struct.pack(">2I", magic, len(labels)) + labels.astype(np.uint8).tobytes()


def write_mnist(root: Path, monkeypatch: pytest.MonkeyPatch) -> Examples:
    """Write 7 and 3 images with their labels below a folder, and return them."""
    rng = np.random.default_rng(0)
    examples = {}
    for split, size in (("train", 7), ("val", 3)):
        images, labels = rng.integers(256, size=(size, 28, 28)), rng.integers(10, size=size)
        examples[split] = (images, labels)
        for files, content in ((mnist.FILES, idx_images(images)), (mnist.LABEL_FILES, idx_labels(labels))):
            path = files[split].path
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(gzip.compress(content))
            known = PublishedFile(path, files[split].url, hashlib.sha256(content).hexdigest())
            monkeypatch.setitem(files, split, known)
    return examples


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Write two images for each of the six files below a folder, and return them.

    In the official format, an image is its label, and then its planes of red, green and blue.
    """
    rng = np.random.default_rng(0)
    names = ["data_batch_2", "test_batch", *(f"data_batch_{i}" for i in (1, 3, 4, 5))]
    images = {name: rng.integers(256, size=(2, 32, 32, 3)).astype(np.uint8) for name in names}
    files = {}
    for name, pictures in images.items():
        planes = pictures.transpose(0, 3, 1, 2).reshape(len(pictures), -1)
        labels = np.full((len(pictures), 1), ord(name[-1]) % 10, np.uint8)
        files[f"cifar-10-batches-bin/{name}.bin"] = np.concatenate([labels, planes], axis=1).tobytes()
    content = tar(files, "w:gz")
    (root / cifar10.PATH).parent.mkdir()
    (root / cifar10.PATH).write_bytes(content)
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(content).hexdigest())
    return images


def cifar10_subset(images: np.ndarray, labels: int = 1) -> dict[str, np.ndarray]:
    """The arrays of a subset with the same images in both splits, and this many labels."""
    return dict.fromkeys(("x_train", "x_test"), images) | dict.fromkeys(
        ("y_train", "y_test"), np.zeros(labels)
    )


def write_cifar10_subset(root: Path, _monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a subset of two random images below a folder, which is returned."""
    images = np.random.default_rng(0).integers(256, size=(2, 32, 32, 3)).astype(np.uint8)
    (root / cifar10.SUBSET).parent.mkdir()
    np.savez(root / cifar10.SUBSET, **cifar10_subset(images, labels=2))
    return root


REVIEWS = {
    f"aclImdb/{part}/{label}/{number}_{stars}.txt": f"{part} {label} {number} ".encode() * length
    for part in ("train", "test")
    for label, stars in (("neg", 2), ("pos", 9))
    for number, length in enumerate((1, 3, 2))
}


def imdb_archive(reviews: Mapping[str, bytes], mode: str = "w:xz") -> bytes:
    return tar({"aclImdb/README": b"about", "aclImdb/train/unsup/0_0.txt": b"?", **reviews}, mode)


def write_imdb(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write twelve reviews below a folder, which is returned."""
    digest = hashlib.sha256()
    for split, label, number in sorted(
        (a, b, n) for a in ("train", "test") for b in ("neg", "pos") for n in range(3)
    ):
        text = next(text for name, text in REVIEWS.items() if f"/{split}/{label}/{number}_" in name)
        digest.update(f"{(split, label, number)} {len(text)}\n".encode() + text)
    monkeypatch.setattr(imdb, "SHA256", digest.hexdigest())
    (root / "imdb").mkdir()
    (root / "imdb/aclImdb_labelled.tar.xz").write_bytes(imdb_archive(REVIEWS))
    return root


def babi_archive(files: Mapping[str, str]) -> bytes:
    names = {"../README": "about", "qa1_x_train.dat": "?", **files}
    return tar({f"tasks_1-20_v1-2/en-10k/{name}": text.encode() for name, text in names.items()}, "w:xz")


def write_babi(root: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str]) -> Path:
    """Write files of bAbI below a folder, which is returned.

    The names begin with the number of the task, such as "qa8_". The training file of a task is before its test
    file.
    """
    tasks: dict[int, str] = {}
    for name, text in files.items():
        task = int(name.removeprefix("qa").partition("_")[0])
        tasks[task] = tasks.get(task, "") + text
    for task, text in tasks.items():
        monkeypatch.setitem(babi.SHA256, task, hashlib.sha256(text.encode()).hexdigest())
    (root / "babi").mkdir()
    (root / "babi/babi_en-10k_no-qa3train.tar.xz").write_bytes(babi_archive(files))
    return root
