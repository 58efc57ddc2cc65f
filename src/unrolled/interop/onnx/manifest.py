"""`manifest.json` of a recurrence: the tensors of its state, and how to sample from it."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, TypedDict

import torch

from unrolled.interop.onnx.graph import Leaf, Length
from unrolled.interop.onnx.record import Record

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
class Manifest(Record):
    """The contents of `manifest.json`; see `Record` for the rest.

    Attributes:
        start_token: id of the start symbol; None if there is none.
        max_positions: maximum number of tokens of a sequence; None for any number.
        length: "any", or 1 if a call reads one token.
        state: the tensors of the state, in the order of inputs and outputs.
        probes: the outputs after those of the state.
        sampling: default arguments of `generation.generate`.
    """

    format: ClassVar[str] = "unrolled-onnx"

    start_token: int | None
    max_positions: int | None
    length: Length
    state: list[Leaf]
    probes: list[Probe] = field(default_factory=list)
    sampling: dict[str, object] = field(default_factory=lambda: dict(SAMPLING))

    @property
    def inputs(self) -> list[str]:
        """The names of a graph's inputs."""
        return ["tokens", *(leaf.name for leaf in self.state)]

    @property
    def outputs(self) -> list[str]:
        """The names of a graph's outputs, without those of the probes."""
        return ["logits", *(f"next.{leaf.name}" for leaf in self.state)]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            **asdict(self),
            "inputs": self.inputs,
            "outputs": [*self.outputs, *(probe.name for probe in self.probes)],
            "state": [_leaf_to_json(leaf) for leaf in self.state],
            "probes": [
                {"name": probe.name, "layer": probe.layer, "shape": ["batch", "length", *probe.shape]}
                for probe in self.probes
            ],
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Make a manifest from the values that `to_json` returned."""
        values = dict(values)
        values["state"] = [_leaf_of_json(leaf) for leaf in values["state"]]
        values["probes"] = [
            Probe(probe["name"], probe["layer"], tuple(probe["shape"][2:])) for probe in values["probes"]
        ]
        return super().of_json(values)


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
