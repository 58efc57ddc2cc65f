"""The base of all manifests of exported folders, with a hash of every file and of the manifest itself."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict

from unrolled.files import write_file
from unrolled.folders import MANIFEST_FILE

VERSION = 1


class FileEntry(TypedDict):
    """Hash and size of a file."""

    sha256: str
    bytes: int


class GraphEntry(FileEntry):
    """Name, hash and size of the file of a graph."""

    file: str


@dataclass(kw_only=True)
class Record:
    """The contents of a `manifest.json` that all kinds of exported models have.

    A kind of model derives from this class, and defines `format`, `inputs` and `outputs`.

    Attributes:
        unrolled: the version of this library that wrote the folder.
        opset: version of ONNX's standard operators in the graphs.
        model: the model's kind and config.
        weights: a checksum of the model's weights.
        vocab_size: number of token ids that can be predicted.
        graphs: file, sha256 and bytes of each graph, by its name.
        files: sha256 and bytes of every other file, by its path.
    """

    format: ClassVar[str]

    unrolled: str
    opset: int
    model: dict[str, object]
    weights: str
    vocab_size: int
    graphs: dict[str, GraphEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def inputs(self) -> list[str]:
        """The names of a graph's inputs."""
        raise NotImplementedError

    @property
    def outputs(self) -> list[str]:
        """The names of a graph's outputs."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "inputs": self.inputs, "outputs": self.outputs}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Make a record from the values that `to_json` returned."""
        return cls(**{name: x for name, x in values.items() if name not in ("inputs", "outputs")})

    def write(self, folder: Path, graphs: Mapping[str, bytes], files: Mapping[str, bytes]) -> None:
        """Write graphs and other files, each by name, and a manifest that describes them.

        The files that an earlier manifest in the folder lists are deleted.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name in listed_files(folder):  # before the manifest, so that an export can go on after a crash
            (folder / name).unlink(missing_ok=True)
        (folder / MANIFEST_FILE).unlink(missing_ok=True)  # first, so that it never describes other graphs
        for name, content in files.items():
            write_file(folder / name, content)
            self.files[name] = describe_file(folder / name)
        for name, content in graphs.items():
            path = folder / f"{name}.onnx"
            write_file(path, content)
            self.graphs[name] = {"file": path.name, **describe_file(path)}
        self.save(folder)

    def save(self, folder: Path) -> None:
        """Write `manifest.json`."""
        values = {"format": self.format, "version": VERSION, **self.to_json()}
        values["sha256"] = _digest(values)
        text = json.dumps(values, indent=1, allow_nan=False) + "\n"
        write_file(folder / MANIFEST_FILE, text)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `manifest.json`.

        Raises:
            ValueError: there is no manifest, it was changed after it was written, or it has another format.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise ValueError(f"{folder} is not a folder of unrolled export: it has no {MANIFEST_FILE}")
        try:
            values = json.loads(path.read_text())
            found = values["format"], values["version"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from error
        if found != (cls.format, VERSION):
            raise ValueError(
                f"{path} has the format {found[0]!r} in version {found[1]!r}, "
                f"but must have {cls.format!r} in version {VERSION}"
            )
        if values.pop("sha256", None) != _digest(values):
            raise ValueError(f"{path} was changed after it was written; export again")
        del values["format"], values["version"]
        return cls.of_json(values)

    def entries(self) -> dict[str, FileEntry]:
        """Return the sizes and hashes of all files, by their paths."""
        return {**{graph["file"]: graph for graph in self.graphs.values()}, **self.files}

    def read(self, folder: Path, name: str) -> bytes:
        """Read a file of the folder, verify its size and hash, and return its bytes.

        Raises:
            ValueError: the file is missing, or its size or hash does not match.
        """
        entry, path = self.entries()[name], folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        if len(content) != entry["bytes"]:
            raise ValueError(
                f"{path} has {len(content)} bytes, but must have {entry['bytes']} according to "
                f"{MANIFEST_FILE}; export again"
            )
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"{path} is not the file of {MANIFEST_FILE}, its SHA-256 differs; export again")
        return content


def describe_file(path: Path) -> FileEntry:
    """Return the hash and size of a file, as in a manifest."""
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def listed_files(folder: Path) -> list[str]:
    """Name the files in a folder that its manifest lists; none if it has no manifest or a damaged one."""
    try:
        values = json.loads((folder / MANIFEST_FILE).read_text())
        if values.pop("sha256") != _digest(values):
            return []
        names = [*(graph["file"] for graph in values["graphs"].values()), *values["files"]]
        own = [name for name in names if Path(name).name == name]  # not a path to another folder
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [name for name in own if (folder / name).is_file()]


def _digest(values: dict[str, object]) -> str:
    """SHA-256 of a manifest without its own digest, regardless of order and whitespace in the file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
