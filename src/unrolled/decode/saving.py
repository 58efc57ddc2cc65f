"""Plans as folders: a model's config and documents, and its packed weights in one file.

A layer L whose matrix is packed has the tensors L.tiles, L.scales, L.sums and L.bias, as far as its form
needs them (see `unrolled.decode.packing.Packed`). All other parameters are stored under their names:
embeddings in bfloat16, or in fp32 if the matrices are in fp32, and the others in fp32.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unrolled.decode.packing import LAYOUT, PACKINGS, Weights
from unrolled.files import DIGEST_KEY, PADDING_KEY, load_tensors, read_header
from unrolled.folders import CONFIG_FILE, PLAN_FILE
from unrolled.models import Decoder
from unrolled.models.saving import build, check_tensors, read_config, read_json, save_folder

if TYPE_CHECKING:
    from unrolled.decode.plan import Plan
    from unrolled.decode.program import Program

VERSION = "2"
_DRAWS = {"uniform_", "normal_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_"}
_PARTS = ("tiles", "scales", "sums", "bias")


class Saved(NamedTuple):
    """What a folder holds.

    Attributes:
        model: the model with its documents, but without its packed matrices, which are on the meta device.
        weights: the form of the packed matrices.
        packed: the tensors of the packed matrices, by the name of the layer.
    """

    model: Decoder
    weights: Weights
    packed: dict[str, dict[str, Tensor]]


def tensors(program: "Program") -> dict[str, Tensor]:
    """Return the tensors that a folder holds, by name."""
    found = {
        f"{layer}.{part}": x
        for layer, matrix in program.packed.items()
        for part, x in matrix.tensors().items()
    }
    return found | program.others


def save(plan: "Plan", path: str | Path) -> None:
    """Write a plan into the folder `path`; see `Plan.save`."""
    config = {"model": Decoder.model_name, **asdict(plan.config)}
    metadata = {"weights": plan.weights, "layout": LAYOUT, "version": VERSION}
    save_folder(path, PLAN_FILE, config, plan.documents, plan.tensors(), metadata, aligned=True)


def read(path: str | Path) -> Saved:
    """Read a folder that `save` wrote; see `unrolled.decode.load`."""
    folder = Path(path)
    file = folder / PLAN_FILE
    values = read_config(folder)
    if not file.exists():
        raise ValueError(f"{path} holds no packed weights: it has no {PLAN_FILE}")
    if (kind := values.pop("model")) != Decoder.model_name:
        raise ValueError(f"{path} holds a model of kind {kind!r}, but must hold one of kind 'decoder'")
    weights = form(file)
    documents: dict[str, object] = {}
    found = load_tensors(file, lambda name: documents.setdefault(name, read_json(folder / name)))
    found.pop(PADDING_KEY, None)
    with Unfilled():
        model = build(Decoder, values, folder / CONFIG_FILE, file)
    packed = _packed(found)
    others = {name: x for name, x in found.items() if not _of_matrix(name, packed, _PARTS)}
    own = {
        name: x for name, x in model.state_dict().items() if not _of_matrix(name, packed, ("weight", "bias"))
    }
    check_tensors(own, others, file)
    model.load_state_dict(others, strict=False, assign=True)
    for name, layer in model.named_modules():
        if name in packed and isinstance(layer, nn.Linear):
            _forget(layer)
    model.documents = {name: x for name, x in documents.items() if name != CONFIG_FILE}
    return Saved(model, weights, packed)


def form(file: Path) -> Weights:
    """Return the form of the weights in a file.

    Raises:
        ValueError: this library did not write it, or did so in another layout.
    """
    metadata = read_header(file).metadata
    if metadata.get("weights") not in PACKINGS or DIGEST_KEY not in metadata:
        raise ValueError(f"{file} is not a file of packed weights that this library wrote")
    if (found := (metadata.get("layout"), metadata.get("version"))) != (LAYOUT, VERSION):
        raise ValueError(
            f"{file} holds {found[0]}, version {found[1]}, but must hold {LAYOUT}, version {VERSION}"
        )
    return cast(Weights, metadata["weights"])


def _packed(found: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    layers = [name.removesuffix(".tiles") for name in found if name.endswith(".tiles")]
    return {
        layer: {part: found[f"{layer}.{part}"] for part in _PARTS if f"{layer}.{part}" in found}
        for layer in layers
    }


def _of_matrix(name: str, packed: Mapping[str, object], parts: tuple[str, ...]) -> bool:
    layer, _, part = name.rpartition(".")
    return layer in packed and part in parts


def _forget(layer: nn.Linear) -> None:
    """Replace parameters by parameters without values, whose use is an error."""
    for name, x in layer.named_parameters(recurse=False):
        setattr(layer, name, nn.Parameter(torch.empty(x.shape, device="meta")))


class Unfilled(TorchFunctionMode):
    """Leaves weights uninitialised instead of drawing them: unwritten memory takes no space."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        drawn = func is torch.randn and "generator" not in kwargs  # rows of random features have one
        return (torch.empty if drawn else func)(*args, **kwargs)
