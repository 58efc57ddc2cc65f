"""Small files in the format of Multi30k."""

import gzip
import hashlib
from pathlib import Path

import pytest

from unrolled.data import multi30k

NOUNS = [("dog", "Hund"), ("man", "Mann"), ("tree", "Baum"), ("boat", "Kahn")]


def sentences(count: int, offset: int = 0) -> tuple[list[str], list[str]]:
    """Pairs of many lengths, each of its own words."""
    english, german = [], []
    for i in range(offset, offset + count):
        picked = [NOUNS[(i + j) % 4] for j in range(1 + i % 5)]
        english.append(f"number {i}: " + " and ".join(f"a {x}" for x, _ in picked) + ".")
        german.append(f"Nummer {i}: " + " und größer ".join(f"ein {x}" for _, x in picked) + ".")
    return english, german


def write_multi30k(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write all ten files below a folder, and make their checksums the published ones."""
    folder = root / "multi30k"
    folder.mkdir()
    for part, count in zip(multi30k.PARTS, (50, 9, 4, 3, 2), strict=True):
        for language, lines in zip(("en", "de"), sentences(count, offset=len(part)), strict=True):
            content = "".join(f"{line}\n" for line in lines).encode()
            (folder / f"{part}.{language}.gz").write_bytes(gzip.compress(content))
            monkeypatch.setitem(multi30k.SHA256, f"{part}.{language}", hashlib.sha256(content).hexdigest())
    return root
