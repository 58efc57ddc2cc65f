"""The documents of text, JSONL and Parquet files, read without holding a whole file in memory.

The name of a file determines its format: `.jsonl`, `.ndjson` and `.json` have a JSON object in each line,
`.parquet` has columns, and any other file is text in UTF-8, whose byte-order mark is dropped and whose line
ends become newlines. Text and JSONL are decompressed if the name ends in `.gz` or `.zst`.

Long documents are cut into pieces; see `unrolled.data._tokenizer.pieces`. Text is read piece by piece; a
document of JSONL or Parquet is held in memory as a whole.
"""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from unrolled.data._tokenizer import LONGEST_PIECE, end_of_piece, pieces
from unrolled.extras import how_to_install

LINES = (".jsonl", ".ndjson", ".json")
LONGEST_LINE = 2**30  # bytes; a file with a longer line is taken for one without line ends
ROWS = 256  # of Parquet, read at once


class Piece(NamedTuple):
    """A piece of a document.

    Attributes:
        text: the text of the piece; it is not empty.
        place: number of the file, of the document in the file, and of the first character in the document.
        begins: whether it is the first piece of its document.
        ends: whether it is the last piece of its document.
    """

    text: str
    place: tuple[int, int, int]
    begins: bool
    ends: bool

    @property
    def after(self) -> tuple[int, int, int]:
        """The place of the piece that follows."""
        file, document, character = self.place
        return (file, document + 1, 0) if self.ends else (file, document, character + len(self.text))


@dataclass(frozen=True)
class Documents:
    """The documents of files.

    Attributes:
        files: the files in order.
        separator: text between the documents of a text file, not empty; None if each text file is one
            document.
        field: key of JSONL objects, or column of Parquet files, that holds the text.
    """

    files: Sequence[Path]
    separator: str | None = None
    field: str = "text"

    def __post_init__(self) -> None:
        if self.separator == "":
            raise ValueError("separator is '', but must be a text of at least one character, or None")

    @property
    def formats(self) -> set[str]:
        """The formats of the files: "text", "jsonl" or "parquet"."""
        return {file_format(file) for file in self.files}

    def pieces(
        self,
        *,
        first: int = 0,
        most: Sequence[int] | None = None,
        on_bytes: Callable[[int], object] = lambda done: None,
    ) -> Iterator[Piece]:
        """Yield the pieces of all documents that have any text, in order.

        Args:
            first: number of the file to begin with.
            most: for each file, the number of characters after which no more pieces of it are read.
            on_bytes: called from time to time with the number of bytes of the files read so far.

        Raises:
            ImportError: a library that the format needs is missing.
            ValueError: a file is not of its format, or lacks the field.
            OSError: a file cannot be read.
        """
        before = 0
        for number, file in enumerate(self.files):
            size = file.stat().st_size
            if number >= first:
                read = 0
                for piece in self._of_file(number, file, partial(_add, on_bytes, before)):
                    yield piece
                    read += len(piece.text)
                    if most is not None and read >= most[number]:
                        break
            before += size
            on_bytes(before)

    def _of_file(self, number: int, file: Path, on_bytes: Callable[[int], object]) -> Iterator[Piece]:
        kind = file_format(file)
        if kind == "text":
            yield from _of_text(number, file, self.separator, on_bytes)
            return
        texts = _of_lines if kind == "jsonl" else _of_rows
        for document, text in enumerate(texts(file, self.field, on_bytes)):
            character = 0
            whole = whole_characters(text)
            for piece in pieces(whole):
                place, ends = (number, document, character), character + len(piece) == len(whole)
                yield Piece(piece, place, character == 0, ends)
                character += len(piece)


def _add(on_bytes: Callable[[int], object], before: int, done: int) -> None:
    on_bytes(before + done)


def file_format(file: Path) -> str:
    """Return "text", "jsonl" or "parquet".

    Raises:
        ValueError: a Parquet file is compressed as a whole.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes] or [""]
    packed = suffixes[-1] in (".gz", ".zst")
    inner = suffixes[-2] if packed and len(suffixes) > 1 else suffixes[-1]
    if inner == ".parquet" and packed:
        raise ValueError(f"{file} is a compressed Parquet file, but must not be: decompress it first")
    return "parquet" if inner == ".parquet" else "jsonl" if inner in LINES else "text"


def whole_characters(text: str) -> str:
    """Return a text in which halves of surrogate pairs, which JSON may hold, are joined or become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextmanager
def opened(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file; yield its content, decompressed if its name ends in `.gz` or `.zst`, and the file itself.

    Raises:
        ImportError: the library that decompresses is missing.
        ValueError: inside the block, the content cannot be decompressed.
    """
    with file.open("rb") as raw:
        if file.suffix.lower() not in (".gz", ".zst"):
            yield raw, raw
            return
        bad: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
        if file.suffix.lower() == ".gz":
            content: Any = gzip.GzipFile(fileobj=raw)
        else:
            zstd = zstd_module()
            content, bad = zstd.ZstdFile(raw), (*bad, zstd.ZstdError)
        try:
            with content:
                yield content, raw
        except bad as error:
            raise ValueError(f"{file} cannot be decompressed: {error}") from error


def _of_text(
    number: int, file: Path, separator: str | None, on_bytes: Callable[[int], object]
) -> Iterator[Piece]:
    """Yield the pieces of a text file."""
    ahead = LONGEST_PIECE + len(separator or "") + 1  # a separator may begin just before the end of a piece
    held, at, document, character, done = "", 0, 0, 0, False

    def piece(end: int, ends: bool) -> Piece:
        return Piece(held[at:end], (number, document, character), character == 0, ends)

    with opened(file) as (content, raw), io.TextIOWrapper(content, "utf-8-sig", newline=None) as reader:
        while not done:
            try:
                found = reader.read(LONGEST_PIECE)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not text in UTF-8: {error.reason}") from error
            on_bytes(raw.tell())
            held, at, done = held[at:] + found, 0, not found
            while at < len(held):
                border = -1 if separator is None else held.find(separator, at)
                end = border if border >= 0 else len(held)
                whole = border >= 0 or done
                if end - at > LONGEST_PIECE and (whole or len(held) - at >= ahead):
                    cut = end_of_piece(held, at)
                    yield piece(cut, False)
                    at, character = cut, character + cut - at
                elif whole:
                    if end > at:
                        yield piece(end, True)
                    at, document, character = end + len(separator or ""), document + 1, 0
                else:
                    break


def _of_lines(file: Path, field: str, on_bytes: Callable[[int], object]) -> Iterator[str]:
    """Yield the texts of JSONL; empty lines are left out."""
    with opened(file) as (content, raw):
        lines = iter(lambda: content.readline(LONGEST_LINE), b"")
        for number, line in enumerate(lines, 1):
            if len(line) == LONGEST_LINE:
                raise ValueError(
                    f"{file}: line {number} has {LONGEST_LINE:,} bytes or more, too many for a document"
                )
            on_bytes(raw.tell())
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}: line {number} is not JSON: {error}") from error
            if not isinstance(values, dict):
                raise ValueError(f"{file}: line {number} is {values!r:.60}, but must be a JSON object")
            if field not in values:
                keys = ", ".join(map(repr, values)) or "none"
                raise ValueError(f"{file}: line {number} has no field {field!r}; its fields are {keys}")
            if not isinstance(values[field], str):
                raise ValueError(
                    f"{file}: line {number} has {field} = {values[field]!r:.60}, but it must be text"
                )
            yield values[field]


def _of_rows(file: Path, field: str, on_bytes: Callable[[int], object]) -> Iterator[str]:
    """Yield the texts of a column of Parquet."""
    try:
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow, which is missing: {how_to_install('tokenize')}") from error
    size = file.stat().st_size
    try:
        with parquet.ParquetFile(file) as table:
            if field not in table.schema_arrow.names:
                names = ", ".join(map(repr, table.schema_arrow.names))
                raise ValueError(f"{file} has no column {field!r}; its columns are {names}")
            rows, read = table.metadata.num_rows, 0
            for batch in table.iter_batches(ROWS, columns=[field], use_threads=False):
                for text in batch.column(0).to_pylist():
                    read += 1
                    if not isinstance(text, str):
                        raise ValueError(
                            f"{file}: row {read} has {field} = {text!r:.60}, but it must be text"
                        )
                    yield text
                on_bytes(size * read // rows)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the system; damaged pages have no number
        raise ValueError(f"{file} is not a Parquet file, or is damaged: {error}") from error


def zstd_module() -> Any:
    """Return the module that reads .zst: that of the standard library from Python 3.14 on."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"a .zst file needs {name}, which is missing: {how_to_install('tokenize')}"
        ) from error
