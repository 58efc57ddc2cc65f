"""The ids of a tokenised corpus, mapped from its shards: only what is read comes into memory."""

import mmap
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from unrolled.contract import Split
from unrolled.data._corpus.index import TOKENIZER_FILE, Index, Shard, shard_files
from unrolled.data._tokenizer import TextTokenizer
from unrolled.files import file_digest

MAPPED = 256  # files mapped at a time; each takes a file descriptor


class Ids:
    """The ids of one split, as if its shards were one array.

    Args:
        folder: folder of the corpus.
        split: name of the split.
        index: index of the corpus.

    Raises:
        ValueError: a shard is missing, or has another size.
    """

    def __init__(self, folder: Path, split: Split, index: Index) -> None:
        self._folder, self._index = folder, index
        numbered = [(n, part.shards[split]) for n, part in enumerate(index.parts) if split in part.shards]
        self._files = [shard_files(split, n) for n, _ in numbered]
        for names, (_, shard) in zip(self._files, numbered, strict=True):
            for name, size in zip(names, shard.sizes, strict=True):
                check_size(folder / name, size)
        self._shards: list[Shard] = [shard for _, shard in numbered]
        self._ends = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._map = lru_cache(MAPPED)(partial(_mapped, folder))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to `stop` - 1, int64.

        Raises:
            ValueError: a shard is damaged.
        """
        found = [np.empty(0, np.int64)]
        for number, first, last in self._within(start, stop):
            name, _ = self._files[number]
            ids = self._map(name, self._index.dtype, self._shards[number].tokens)[first:last]
            if len(ids) and ids.max() >= self._index.vocab_size:
                raise ValueError(
                    f"{self._folder / name} is damaged: it has the id {ids.max()}, but the ids are 0 to "
                    f"{self._index.vocab_size - 1}"
                )
            found.append(ids.astype(np.int64))
        return np.concatenate(found)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Return the places from `start` to `stop` - 1 where documents begin, counted from `start`, int64."""
        found = [np.empty(0, np.int64)]
        for number, first, last in self._within(start, stop):
            _, name = self._files[number]
            if count := self._shards[number].starts:
                starts = self._map(name, "uint32", count)
                # Numbers of another type would make numpy convert the whole file.
                begin, end = np.searchsorted(starts, np.array([first, last], starts.dtype))
                found.append(starts[begin:end].astype(np.int64) + int(self._ends[number]) - start)
        return np.concatenate(found)

    def _within(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the shards that hold the ids from `start` to `stop` - 1, each with the range in it."""
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        last = int(np.searchsorted(self._ends, stop, side="left"))
        bounds = [(n, int(self._ends[n]), int(self._ends[n + 1])) for n in range(first, last)]
        return [(n, max(start, begin) - begin, min(stop, end) - begin) for n, begin, end in bounds]


class Corpus:
    """A folder of `unrolled tokenize`.

    Attributes:
        index: its `index.json`.
        tokenizer: its `tokenizer.json`.

    Args:
        folder: its path.

    Raises:
        ImportError: the library `tokenizers` is not installed.
        ValueError: the folder is not a corpus, the corpus is not finished, or a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, Index.load(folder)
        if not self.index.complete:
            raise ValueError(f"{folder} is not finished: repeat the command unrolled tokenize that made it")
        self.tokenizer = read_tokenizer(folder / TOKENIZER_FILE, self.index)

    def ids(self, split: Split) -> Ids:
        """Return the ids of a split.

        Raises:
            ValueError: a shard is missing, or has another size.
        """
        return Ids(self.folder, split, self.index)


def read_tokenizer(path: Path, index: Index) -> TextTokenizer:
    """Read the tokenizer of a corpus.

    Raises:
        ImportError: the library `tokenizers` is not installed.
        ValueError: the file is missing, or is not the tokenizer that the corpus was made with.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: repeat the command unrolled tokenize that made it")
    if file_digest(path) != index.settings.get("tokenizer_sha256"):
        raise ValueError(f"{path} is not the tokenizer that the corpus was made with: its SHA-256 differs")
    return TextTokenizer.of_json(path.read_text(encoding="utf-8"), index.end)


def check_size(path: Path, size: int) -> None:
    """Raise ValueError unless the file exists and has this size."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; repeat the command unrolled tokenize that made it"
        ) from error
    if found != size:
        raise ValueError(
            f"{path} is damaged: it has {found:,} bytes instead of {size:,}; repeat the command unrolled "
            "tokenize that made it"
        )


def _mapped(folder: Path, name: str, dtype: str, length: int) -> np.ndarray:
    """Map a file of ids.

    Raises:
        ValueError: the file is damaged, or holds numbers of another dtype or length.
    """
    try:
        found: np.ndarray = np.load(folder / name, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{folder / name} is damaged: {error}") from error
    if (found.dtype, found.shape) != (np.dtype(dtype), (length,)):
        raise ValueError(
            f"{folder / name} is damaged: it holds {found.dtype} of the shape {list(found.shape)} instead of "
            f"{dtype} of [{length}]"
        )
    base: Any = found.base
    if hasattr(mmap, "MADV_RANDOM"):  # read only the pages that are asked for, not those after them
        base.madvise(mmap.MADV_RANDOM)
    return found
