"""Files of published data sets: found or downloaded, and always verified.

The folder to look in is `data_dir` if given, else `$UNROLLED_DATA`, else `~/.cache/unrolled`.
"""

import gzip
import hashlib
import http.client
import io
import lzma
import os
import re
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from unrolled.files import write_file

T = TypeVar("T")

TIMEOUT = 30.0  # seconds without an answer before a download fails
GZIP = b"\x1f\x8b"  # how a gzip file begins
BAD_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)
BAD_ARCHIVE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class PublishedFile:
    """A file whose content is known.

    Attributes:
        path: "folder/file" below the data folder; the file may also lie directly in the data folder, and its
            name may have `.gz` at the end.
        url: the official address.
        sha256: SHA-256 of the content, after decompression if it is a gzip file, so that recompression does
            not change it.
    """

    path: str
    url: str
    sha256: str


def folder(data_dir: str | Path | None = None) -> Path:
    """Return the folder to look in.

    Raises:
        ValueError: `data_dir` is not the name of a folder.
    """
    if not isinstance(data_dir, str | Path | None):
        raise ValueError(f"data_dir is {data_dir!r}, but must be the name of a folder")
    return Path(data_dir or os.environ.get("UNROLLED_DATA") or "~/.cache/unrolled").expanduser()


def read_published(file: PublishedFile, data_dir: str | Path | None = None) -> bytes:
    """Return the verified, decompressed content of a published file, downloading it once if it is missing.

    Raises:
        ValueError: the file is corrupt, or it is missing and cannot be downloaded or written.
    """
    paths = [file.path] if file.path.endswith(".gz") else [file.path, f"{file.path}.gz"]
    return load_published(paths, file.url, partial(_verified, file=file), data_dir)


def load_published(
    paths: Sequence[str], url: str, parse: Callable[[bytes], T], data_dir: str | Path | None = None
) -> T:
    """Return what `parse` makes of a published file, downloading it once if it is missing.

    Args:
        paths: where the file may be: "folder/file" below the data folder; the file may also lie directly in
            the data folder. A download is stored at the first path.
        url: the official address of the file.
        parse: verifies and reads the bytes; if they are wrong, it raises ValueError with the reason.
        data_dir: see `folder`.

    Raises:
        ValueError: the file is corrupt, or it is missing and cannot be downloaded or written.
    """
    root = folder(data_dir)
    places = [place for path in paths for place in (root / path, root / Path(path).name)]
    for place in places:
        if place.is_file():
            raw = _read(place)
            try:
                return parse(raw)
            except ValueError as error:
                raise ValueError(f"{place} is corrupt: {error}; replace it by {url}") from error
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            raw = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"{places[1].name} is neither at {places[0]} nor at {places[1]} and could not be downloaded from "
            f"{url} ({error}): put it there, or name its folder with data_dir or UNROLLED_DATA"
        ) from error
    try:
        content = parse(raw)
    except ValueError as error:
        raise ValueError(f"the download from {url} is corrupt: {error}") from error
    _keep(raw, places[0])
    return content


def read_file(path: str | Path) -> bytes:
    """Return the content of any file, decompressed if its name ends in `.gz`.

    Raises:
        ValueError: the file cannot be read or decompressed.
    """
    path = Path(path).expanduser()
    try:
        raw = _read(path)
        return gzip.decompress(raw) if path.name.endswith(".gz") else raw
    except BAD_GZIP as error:
        raise ValueError(f"{path} cannot be decompressed: {error}") from error


def read_archive(archive: bytes, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], bytes]]:
    """Read the files of a tar archive whose names match a pattern; return the matches and the contents.

    Raises:
        ValueError: `archive` is not a tar archive.
    """
    found = []
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                if (match := pattern.fullmatch(member.name)) and (file := tar.extractfile(member)):
                    found.append((match, file.read()))
    except BAD_ARCHIVE as error:
        raise ValueError(f"it is not a tar archive ({error})") from error
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _verified(raw: bytes, file: PublishedFile) -> bytes:
    try:
        content = gzip.decompress(raw) if raw.startswith(GZIP) else raw
    except BAD_GZIP as error:
        raise ValueError(
            f"it cannot be decompressed ({error}), and its content must have the sha256 {file.sha256}"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise ValueError(f"its content has the sha256 {found} instead of {file.sha256}")
    return content


def _keep(raw: bytes, path: Path) -> None:
    try:
        write_file(path, raw)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}): "
            "name a writable folder with data_dir or UNROLLED_DATA"
        ) from error
