"""Files that are whole or absent, and safetensors files that know whether they were changed."""

import hashlib
import json
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

DIGEST_KEY, DOCUMENTS_KEY = "sha256", "documents"
NO_DIGEST = "0" * 64  # stands in for the digest while it is computed
T = TypeVar("T")


def write_file(file: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file in one step: a process that is killed leaves the old one as it was, or none.

    Args:
        file: replaced if it exists; its folder is made if needed.
        content: bytes, text to be encoded as UTF-8, or a function that writes to the path it is given.

    Raises:
        OSError: the file cannot be written, as on a full disk; an older one is as it was.
    """
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # another process may write the same file
    with system_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            if callable(content):
                content(temporary)
            else:
                temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def system_errors(file: str | Path) -> Iterator[None]:
    """Raise what the system refused while `file` was written as an OSError that names it.

    Libraries in Rust, safetensors and tokenizers among them, raise exceptions of their own or plain ones,
    whose text ends in "(os error 28)". An OSError of Python need not name a file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
    except Exception as error:
        told = re.search(r"\(os error (\d+)\)", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(file)) from error


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    documents: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a safetensors file, with a digest by which `load_tensors` finds any later change.

    The digest is the SHA-256 of the file, with zeros in the place of the digest, followed by the documents.

    Args:
        tensors: by name; none may share its memory with another.
        path: the file, replaced in one step.
        documents: JSON values that belong to the tensors and are kept elsewhere, such as a config. The file
            holds their names, which have no commas; their content enters the digest.
        metadata: text to keep in the file, by name.

    Raises:
        OSError: the file cannot be written, as on a full disk; an older one is as it was.
    """
    documents = documents or {}
    metadata = {"format": "pt", **(metadata or {})}
    metadata |= {DIGEST_KEY: NO_DIGEST, DOCUMENTS_KEY: ",".join(sorted(documents))}

    def write(file: Path) -> None:
        save_file({name: x.detach().contiguous() for name, x in tensors.items()}, file, metadata)
        with file.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as content:
            _sort_metadata(content)
            place, digest = _digest(content, NO_DIGEST, documents)
            content[place : place + len(digest)] = digest.encode()

    write_file(Path(path), write)


def load_tensors(path: str | Path, documents: Callable[[str], object] | None = None) -> dict[str, Tensor]:
    """Read a safetensors file. One that `save_tensors` wrote is checked against its digest.

    Args:
        path: the file; files of other programs, which have no digest, are read as they are.
        documents: gives each of the documents that the file was saved with, by name.

    Raises:
        ValueError: the file cannot be read, or it or a document is not as it was saved.
    """
    check_digest(path, documents)
    return _readable(path, lambda: load_file(path))


def add_digest(path: str | Path, documents: Mapping[str, object] | None = None) -> None:
    """Put the digest of `save_tensors` into a safetensors file that another program wrote.

    Raises:
        ValueError: the file cannot be read.
    """
    metadata = read_header(path).metadata
    save_tensors(_readable(path, lambda: load_file(path)), path, documents, metadata)


def check_digest(path: str | Path, documents: Callable[[str], object] | None = None) -> dict[str, object]:
    """Compare a safetensors file with the digest that `save_tensors` put into it, if it has one.

    Returns:
        the documents that the file was saved with, by name.

    Raises:
        ValueError: as `load_tensors`.
    """
    metadata = read_header(path).metadata
    if (saved := metadata.get(DIGEST_KEY)) is None:
        return {}
    names = [name for name in metadata.get(DOCUMENTS_KEY, "").split(",") if name]
    found = {name: documents(name) if documents else None for name in names}
    with Path(path).open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _, digest = _digest(content, saved, found)
    if digest != saved:
        raise ValueError(
            f"{' or '.join([str(path), *names])} was changed after it was saved: its SHA-256 is another one"
        )
    return found


class Header(NamedTuple):
    """What a safetensors file says of itself: `shapes` and types (such as "F32") by name, and `metadata`."""

    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    metadata: dict[str, str]


def read_header(path: str | Path) -> Header:
    """Read what a safetensors file holds, without its tensors.

    Raises:
        ValueError: the file cannot be read.
    """

    def read() -> Header:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: x.get_shape() for name, x in slices.items()}
            return Header(shapes, {name: x.get_dtype() for name, x in slices.items()}, file.metadata() or {})

    return _readable(path, read)


def _readable(path: str | Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _sort_metadata(content: mmap.mmap) -> None:
    """Put the metadata of a safetensors file in order: safetensors writes it in a random one."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content[8 : 8 + size] = text.ljust(size)


def _digest(content: mmap.mmap, written: str, documents: Mapping[str, object]) -> tuple[int, str]:
    """Find where `written` stands for the digest in a safetensors file, and compute the digest."""
    place = content.find(f'"{DIGEST_KEY}":"{written}"'.encode()) + len(DIGEST_KEY) + 4
    total = hashlib.sha256(content[:place])
    total.update(NO_DIGEST.encode())
    with memoryview(content) as view:
        total.update(view[place + len(NO_DIGEST) :])
    total.update(json.dumps(documents, sort_keys=True).encode())
    return place, total.hexdigest()
