"""Writing `.npy` files that grow, and the shards of a part."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np

from unrolled.contract import Split
from unrolled.data._corpus.documents import Piece
from unrolled.data._corpus.index import Part, Shard, shard_files
from unrolled.files import file_digest, system_errors


class GrowingFile:
    """A one-dimensional `.npy` file that is written piece by piece, and gets its name once it is complete.

    numpy leaves room in the header, so that the final length fits in whatever number of digits it has.

    Args:
        path: the file; while it grows, `.tmp` is added to its name.
        dtype: dtype of the numbers.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype, self.length = path, np.dtype(dtype), 0
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._file = self._temporary.open("wb")
        self._header = self._write_header()

    def append(self, numbers: np.ndarray) -> None:
        """Add numbers at the end."""
        self._file.write(numbers.astype(self._dtype).tobytes())
        self.length += len(numbers)

    def finish(self) -> None:
        """Complete the file, and give it its name."""
        self._file.seek(0)
        assert self._write_header() == self._header
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)

    def discard(self) -> None:
        """Remove the file, unless it is complete."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_header(self) -> int:
        header = np.lib.format.header_data_from_array_1_0(np.empty(0, self._dtype))
        np.lib.format.write_array_header_1_0(self._file, header | {"shape": (self.length,)})
        return self._file.tell()


class PartWriter:
    """The shards of one part, for both splits, as a context, which removes unfinished files at its end.

    Args:
        folder: folder of the corpus.
        number: number of the part.
        dtype: dtype of the ids.
    """

    def __init__(self, folder: Path, number: int, dtype: str) -> None:
        self._folder, self._number, self._dtype = folder, number, dtype
        self._files: dict[Split, tuple[GrowingFile, GrowingFile]] = {}
        self._documents = self._text_bytes = 0

    def add(self, split: Split, piece: Piece, ids: np.ndarray) -> None:
        """Append the ids of a piece to the shard of a split."""
        self._documents += piece.place[2] == 0
        self._text_bytes += len(piece.text.encode())
        with system_errors(self._folder):
            if split not in self._files:
                names = shard_files(split, self._number)
                of_ids = GrowingFile(self._folder / names[0], self._dtype)
                self._files[split] = of_ids, GrowingFile(self._folder / names[1], "uint32")
            of_ids, of_starts = self._files[split]
            if piece.begins:
                of_starts.append(np.array([of_ids.length]))
            of_ids.append(ids)

    @property
    def longest(self) -> int:
        """The number of ids of the largest shard."""
        return max((of_ids.length for of_ids, _ in self._files.values()), default=0)

    def finish(self, reached: tuple[int, int, int]) -> Part:
        """Complete the files, and describe them."""
        shards: dict[Split, Shard] = {}
        with system_errors(self._folder):
            for split, (of_ids, of_starts) in self._files.items():
                of_ids.finish()
                of_starts.finish()
                shards[split] = _described(self._folder, split, self._number, of_ids.length, of_starts.length)
        return Part(shards, self._documents, self._text_bytes, reached)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for files in self._files.values():
            for file in files:
                file.discard()


def is_intact(folder: Path, number: int, part: Part) -> bool:
    """Return whether the files of a part are there and unchanged."""
    for split, shard in part.shards.items():
        paths = [folder / name for name in shard_files(split, number)]
        if not all(path.is_file() for path in paths) or shard != _described(
            folder, split, number, shard.tokens, shard.starts
        ):
            return False
    return True


def remove_parts(folder: Path, first: int) -> None:
    """Remove the files of the parts from `first` on, and files that killed processes left."""
    for split in get_args(Split):
        for path in folder.glob(f"{split}-*.npy*"):
            number = path.name.removeprefix(f"{split}-")[:5]
            if path.suffix == ".tmp" or (number.isdigit() and int(number) >= first):
                path.unlink()


def _described(folder: Path, split: Split, number: int, tokens: int, starts: int) -> Shard:
    of_ids, of_starts = (folder / name for name in shard_files(split, number))
    sizes: Any = (of_ids.stat().st_size, of_starts.stat().st_size)
    return Shard(tokens, starts, sizes, (file_digest(of_ids), file_digest(of_starts)))
