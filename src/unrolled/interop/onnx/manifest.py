"""`manifest.json`: the contents of an exported folder, with a hash of every file and of itself."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

from unrolled.files import write_file
from unrolled.interop.onnx.graph import Leaf, Length

FILE_NAME = "manifest.json"
FORMAT, VERSION = "unrolled-onnx", 1
SAMPLING: dict[str, object] = {
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "repetition_penalty": 1.0,
}
TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
_TYPES = {name: dtype for dtype, name in TYPES.items()}
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf}


class FileEntry(TypedDict):
    """Hash and size of a file."""

    sha256: str
    bytes: int


class GraphEntry(FileEntry):
    """Name, hash and size of the file of a graph."""

    file: str


class Probe(NamedTuple):
    """An additional output, the features of the queries of a layer: `[B,T,H,R]`."""

    name: str
    layer: int
    shape: tuple[int, int]  # H, R


class LeafEntry(TypedDict):
    """A `Leaf` as JSON."""

    name: str
    type: str
    shape: list[str | int]
    growing_axis: int | None
    fill: float | str


@dataclass(kw_only=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        unrolled: the version of this library that wrote it.
        opset: version of ONNX's standard operators in the graphs.
        model: the model's kind and config.
        weights: a checksum of the model's weights.
        vocab_size: number of token ids that can be predicted.
        start_token: id of the start symbol; None if there is none.
        max_positions: maximum number of tokens of a sequence; None for any number.
        length: "any", or 1 if a call reads one token.
        state: the tensors of the state, in the order of inputs and outputs.
        probes: the outputs after those of the state.
        sampling: default arguments of `generation.generate`.
        graphs: file, sha256 and bytes of each graph, by its name.
        files: sha256 and bytes of every other file, by its path.
    """

    unrolled: str
    opset: int
    model: dict[str, object]
    weights: str
    vocab_size: int
    start_token: int | None
    max_positions: int | None
    length: Length
    state: list[Leaf]
    probes: list[Probe] = field(default_factory=list)
    sampling: dict[str, object] = field(default_factory=lambda: dict(SAMPLING))
    graphs: dict[str, GraphEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def inputs(self) -> list[str]:
        """The names of a graph's inputs."""
        return ["tokens", *(leaf.name for leaf in self.state)]

    @property
    def outputs(self) -> list[str]:
        """The names of a graph's outputs, without those of the probes."""
        return ["logits", *(f"next.{leaf.name}" for leaf in self.state)]

    def save(self, folder: Path) -> None:
        """Write `manifest.json`."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        values |= {"inputs": self.inputs, "outputs": [*self.outputs, *(probe.name for probe in self.probes)]}
        values["state"] = [_leaf_to_json(leaf) for leaf in self.state]
        values["probes"] = [
            {"name": probe.name, "layer": probe.layer, "shape": ["batch", "length", *probe.shape]}
            for probe in self.probes
        ]
        values["sha256"] = _digest(values)
        text = json.dumps(values, indent=1, allow_nan=False) + "\n"
        write_file(folder / FILE_NAME, text)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read `manifest.json`.

        Raises:
            ValueError: there is none, it was changed after it was written, or it has another format.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise ValueError(f"{folder} is not a folder of unrolled export: it has no {FILE_NAME}")
        try:
            values = json.loads(path.read_text())
            found = values["format"], values["version"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from error
        if found != (FORMAT, VERSION):
            raise ValueError(
                f"{path} has the format {found[0]!r} in version {found[1]!r}, "
                f"but must have {FORMAT!r} in version {VERSION}"
            )
        if values.pop("sha256", None) != _digest(values):
            raise ValueError(f"{path} was changed after it was written; export again")
        for derived in ("format", "version", "inputs", "outputs"):
            del values[derived]
        values["state"] = [_leaf_of_json(leaf) for leaf in values["state"]]
        values["probes"] = [
            Probe(probe["name"], probe["layer"], tuple(probe["shape"][2:])) for probe in values["probes"]
        ]
        return cls(**values)

    def entries(self) -> dict[str, FileEntry]:
        """Sizes and hashes of all files, by their paths."""
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
                f"{path} has {len(content)} bytes, but must have {entry['bytes']} according to {FILE_NAME}; "
                "export again"
            )
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"{path} is not the file of {FILE_NAME}, its SHA-256 differs; export again")
        return content


def describe_file(path: Path) -> FileEntry:
    """Hash and size of a file, as in a manifest."""
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _digest(values: dict[str, object]) -> str:
    """SHA-256 of a manifest without its own digest, regardless of order and whitespace in the file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _leaf_to_json(leaf: Leaf) -> LeafEntry:
    shown = {number: name for name, number in _NUMBERS.items()}
    return {
        "name": leaf.name,
        "type": TYPES[leaf.dtype],
        "shape": ["batch", *leaf.shape],
        "growing_axis": leaf.growing_axis,
        "fill": shown.get(leaf.fill, leaf.fill),
    }


def _leaf_of_json(values: LeafEntry) -> Leaf:
    _, *sizes = values["shape"]
    fill = float(_NUMBERS.get(str(values["fill"]), values["fill"]))
    return Leaf(values["name"], _TYPES[values["type"]], tuple(map(int, sizes)), values["growing_axis"], fill)
