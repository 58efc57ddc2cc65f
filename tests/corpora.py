"""Small corpora for tests."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from unrolled.data import Documents, Tokenizing
from unrolled.data._corpus import writing
from unrolled.data._corpus.documents import zstd_module

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "after",
    "it",
    "while",
    "birds",
    "sang",
    "in",
    "trees",
    "of",
    "gold",
]


def story(number: int, words: int = 40) -> str:
    """Return a document that no other number has."""
    return " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words)) + f" {number} été €😀.\n"


def write_lines(path: Path, texts: Sequence[str], **more: Any) -> Path:
    """Write JSONL, compressed as the name says."""
    content = "".join(json.dumps({"id": i, "text": x, **more}) + "\n" for i, x in enumerate(texts)).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".zst":
        content = zstd_module().compress(content)
    path.write_bytes(content)
    return path


def tokenizing(files: Sequence[Path], **options: Any) -> Tokenizing:
    """Return small settings: byte pairs of 300 ids, shards of 500 tokens, a tenth held out."""
    documents = Documents(files, options.pop("separator", None), options.pop("field", "text"))
    values = {"tokenizer": "bpe", "vocab_size": 300, "sample": 10**6, "end": None, "val_fraction": 0.1}
    return Tokenizing(documents, **(values | {"shard_tokens": 500} | options))


def write_corpus(folder: Path, texts: Sequence[str], **options: Any) -> Path:
    """Tokenise texts into a new folder, which is returned."""
    folder.mkdir(parents=True)
    source = write_lines(folder.with_name(f"{folder.name}.jsonl"), texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "BATCH", 1_000)  # or all would be in one shard
        tokenizing([source], **options).write(folder)
    return folder
