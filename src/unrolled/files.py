"""Atomic file writes, and safetensors files with a digest that detects changes."""

import hashlib
import json
import mmap
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

DIGEST_KEY, DOCUMENTS_KEY = "sha256", "documents"
PADDING_KEY, ALIGNMENT = "padding", 64  # bytes of a cache line and of a wide register
OF_ODD_HEADERS = (KeyError, TypeError, RuntimeError, OverflowError)
"""What safetensors lets through of torch's errors, for a dtype or shape that torch cannot hold."""
NO_DIGEST = "0" * 64  # placeholder while the digest is computed
T = TypeVar("T")


def write_file(file: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file atomically: if the process is killed, the old file stays unchanged.

    Args:
        file: the file, replaced if it exists; its folder is made if needed.
        content: bytes, text to be encoded as UTF-8, or a function that writes to the path that it is given.

    Raises:
        OSError: the file cannot be written, as on a full disk; an existing file is unchanged.
    """
    unique = secrets.token_hex(4)  # other threads, processes and machines may write the same file
    temporary = file.with_name(f"{file.name}.{unique}.tmp")
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


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def read_object(file: Path) -> dict[str, object]:
    """Return the JSON object in a file; an empty dict if there is no object or it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def system_errors(file: str | Path) -> Iterator[None]:
    """Raise system errors inside the block, while `file` is written, as an OSError that names the file.

    Rust libraries such as safetensors and tokenizers raise other exceptions, whose text ends in
    "(os error 28)". An OSError of Python need not name a file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
    except Exception as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    documents: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    aligned: bool = False,
) -> None:
    """Write tensors to a safetensors file, with a digest that lets `load_tensors` detect changes.

    The digest is the SHA-256 of the file, with zeros in place of the digest, followed by the documents.

    Args:
        tensors: the tensors by name; each is written, even if it shares its memory with another one.
        path: the file, replaced in one step.
        documents: JSON values by name that are stored elsewhere and belong to the tensors, such as a config.
            The file holds their names, which must not have commas; the digest covers their content.
        metadata: text to keep in the file, by name.
        aligned: begin the tensors of bytes, which come last, at a multiple of 64 bytes; the tensor
            `PADDING_KEY` fills the gap.

    Raises:
        OSError: the file cannot be written, as on a full disk; an existing file is unchanged.
    """
    documents = documents or {}
    metadata = {"format": "pt", **(metadata or {})}
    metadata |= {DIGEST_KEY: NO_DIGEST, DOCUMENTS_KEY: ",".join(sorted(documents))}
    tensors = apart({name: x.detach().contiguous() for name, x in tensors.items()})

    def write(file: Path) -> None:
        _save_aligned(tensors, file, metadata) if aligned else save_file(tensors, file, metadata)
        with file.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as content:
            sort_metadata(content)
            place, digest = _digest(content, NO_DIGEST, documents)
            content[place : place + len(digest)] = digest.encode()

    write_file(Path(path), write)


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share the memory of one before them, which safetensors refuses to write."""
    found, seen = {}, set()
    for name, x in tensors.items():
        memory = x.untyped_storage().data_ptr()
        found[name] = x.clone() if memory in seen else x
        seen.add(memory)
    return found


def load_tensors(path: str | Path, documents: Callable[[str], object] | None = None) -> dict[str, Tensor]:
    """Read a safetensors file. A file that `save_tensors` wrote is checked against its digest.

    Args:
        path: the file; files of other programs have no digest and are not checked.
        documents: returns each document that the file was saved with, by name.

    Raises:
        ValueError: the file cannot be read, or the file or a document was changed.
    """
    check_digest(path, documents)
    return _readable(path, lambda: load_file(path))


def add_digest(path: str | Path, documents: Mapping[str, object] | None = None) -> None:
    """Add the digest of `save_tensors` to a safetensors file that another program wrote.

    Raises:
        ValueError: the file cannot be read.
    """
    metadata = read_header(path).metadata
    save_tensors(_readable(path, lambda: load_file(path)), path, documents, metadata)


def check_digest(path: str | Path, documents: Callable[[str], object] | None = None) -> dict[str, object]:
    """Check a safetensors file against its digest, if it has one.

    Returns:
        The documents that the file was saved with, by name.

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
            f"{' or '.join([str(path), *names])} was changed after it was saved: its SHA-256 differs"
        )
    return found


class Header(NamedTuple):
    """The header of a safetensors file: `shapes` and `dtypes` (such as "F32") by name, and `metadata`."""

    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    metadata: dict[str, str]


def read_header(path: str | Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        ValueError: the file cannot be read.
    """

    def read() -> Header:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: x.get_shape() for name, x in slices.items()}
            return Header(shapes, {name: x.get_dtype() for name, x in slices.items()}, file.metadata() or {})

    return _readable(path, read)


def sort_metadata(content: mmap.mmap | bytearray) -> None:
    """Sort the metadata of a safetensors file in place, since safetensors writes it in random order."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content[8 : 8 + size] = text.ljust(size)


def _readable(path: str | Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    except OF_ODD_HEADERS as error:
        raise ValueError(f"{path} has a tensor whose dtype or shape PyTorch cannot hold") from error


def _save_aligned(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Save with padding before the tensors of bytes, which safetensors writes after all wider dtypes."""
    wide = sum(x.nbytes for x in tensors.values() if x.dtype != torch.uint8)
    missing = -wide % ALIGNMENT or ALIGNMENT
    padded = {PADDING_KEY: torch.zeros(missing // 2, dtype=torch.int16), **tensors}
    save_file(padded, file, metadata | {PADDING_KEY: ""})
    with file.open("rb") as handle:
        (header,) = struct.unpack("<Q", handle.read(8))
    if missing := -(8 + header) % ALIGNMENT:
        save_file(padded, file, metadata | {PADDING_KEY: " " * missing})


def _digest(content: mmap.mmap, written: str, documents: Mapping[str, object]) -> tuple[int, str]:
    """Return the offset in a safetensors file where the digest `written` stands, and the correct digest."""
    place = content.find(f'"{DIGEST_KEY}":"{written}"'.encode()) + len(DIGEST_KEY) + 4
    total = hashlib.sha256(content[:place])
    total.update(NO_DIGEST.encode())
    with memoryview(content) as view:
        total.update(view[place + len(NO_DIGEST) :])
    total.update(json.dumps(documents, sort_keys=True).encode())
    return place, total.hexdigest()
