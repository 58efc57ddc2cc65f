"""Models as folders: `config.json` holds the kind and its config, `model.safetensors` the weights."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.files import load_tensors, read_header, save_tensors, write_file
from unrolled.folders import CONFIG_FILE, PLAN_FILE, WEIGHTS_FILE, incomplete, of_transformers
from unrolled.models._budget import OverBudgetError, budget
from unrolled.models.config import ModelConfig

Config = TypeVar("Config", bound=ModelConfig)
Model = TypeVar("Model", bound="SavedModel")


class SavedModel(nn.Module):
    """A module that is made from a config and can be saved to and loaded from a folder.

    Attributes:
        config: the sizes and options of the model.
        documents: JSON values that belong to the model, such as its vocabulary, by the name of the file that
            `save` writes beside the weights and `load` reads.
    """

    model_name: ClassVar[str]
    config_type: ClassVar[type[Any]]  # a ModelConfig whose fields are JSON-serialisable
    loss_unit: ClassVar[str | None] = None  # unit of its loss; None for the unit of its task

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.documents: dict[str, object] = {}

    __call__: Callable[..., torch.Tensor]

    def save(self, path: str | Path) -> None:
        """Write the model into the folder `path`, created if needed. A crash leaves no file half-written.

        A module that several blocks share is written once for each of them, and loaded as separate copies.
        The weights file holds a SHA-256 of itself, the config and the documents, which `load` checks.

        Raises:
            ValueError: the config holds an object that is not JSON-serialisable, a document has the name of a
                file of the model, or the folder holds a plan.
        """
        config = {"model": self.model_name, **asdict(self.config)}
        save_folder(path, WEIGHTS_FILE, config, self.documents, self.state_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model that `save` wrote, on the CPU and in the floating-point type it was saved in.

        Raises:
            ValueError: the folder holds no model or one of another class; a file is damaged or was changed
                after it was saved; the config has an unknown or a missing key, or describes a larger model
                than the weights; or a tensor is missing, unknown or of another shape or type.
        """
        folder = Path(path)
        values = read_config(folder)
        if (name := values.pop("model")) != cls.model_name:
            raise ValueError(
                f"{path} holds a model of kind {name!r}, but must hold one of kind {cls.model_name!r}"
            )
        weights = folder / WEIGHTS_FILE
        if not weights.exists():
            if not (folder / PLAN_FILE).exists():
                raise ValueError(f"{path} has neither {WEIGHTS_FILE} nor {PLAN_FILE}")
            raise ValueError(
                f"{path} holds packed weights, in {PLAN_FILE}, but must hold {WEIGHTS_FILE}; "
                "unrolled.decode.load_model reads both"
            )
        model = build(cls, values, folder / CONFIG_FILE, weights)
        documents: dict[str, object] = {}
        load_weights(model, weights, lambda name: documents.setdefault(name, read_json(folder / name)))
        model.documents = {name: x for name, x in documents.items() if name != CONFIG_FILE}
        return model


class RecomputingModel(SavedModel):
    """A model that can recompute activations in the backward pass, to save memory.

    Attributes:
        gradient_checkpointing: set to True to keep only the input of each block for the backward pass.
    """

    gradient_checkpointing = False

    @property
    def recompute(self) -> bool:
        """Whether this forward pass keeps the inputs of the blocks only: never in evaluation."""
        return self.gradient_checkpointing and self.training


def save_folder(
    path: str | Path,
    file_name: str,
    config: Mapping[str, object],
    documents: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    aligned: bool = False,
) -> None:
    """Write documents and tensors into the folder `path`; see `SavedModel.save`.

    Args:
        path: the folder, created if needed.
        file_name: name of the file for the tensors.
        config: what the file `CONFIG_FILE` holds.
        documents: what else belongs to the tensors, by the names of its files.
        tensors, metadata, aligned: as for `save_tensors`.

    Raises:
        ValueError: the config holds an object that is not JSON-serialisable; a document has a name that it
            cannot have; or the folder already holds weights of the other kind: of a model if `file_name` is
            for a plan, or the reverse.
    """
    written = {CONFIG_FILE: config, **documents}
    texts = {name: json.dumps(x, indent=2, default=_refuse) + "\n" for name, x in written.items()}
    for name in documents:
        if name in ("", CONFIG_FILE, WEIGHTS_FILE, PLAN_FILE) or "," in name or name != Path(name).name:
            raise ValueError(
                f"documents has the name {name}, but must have names of other files, without commas"
            )
    folder = Path(path)
    for other in {WEIGHTS_FILE, PLAN_FILE} - {file_name}:
        if (folder / other).exists():
            raise ValueError(
                f"{folder} holds {other}, which may be of another model: remove it, or choose another folder"
            )
    config_file = folder / CONFIG_FILE
    if config_file.exists() and config_file.read_text(encoding="utf-8") != texts[CONFIG_FILE]:
        config_file.unlink()  # first: after a crash, another model's config must not meet these weights
    as_read = {name: json.loads(text) for name, text in texts.items()}  # a tuple becomes a list
    save_tensors(tensors, folder / file_name, as_read, metadata, aligned=aligned)
    for name, text in reversed(texts.items()):  # the config last: without it there is no model
        write_file(folder / name, text)


def read_config(path: str | Path) -> dict[str, object]:
    """Read `config.json` of the model folder `path`: its "model" names the kind, the rest is the config."""
    file = Path(path) / CONFIG_FILE
    if not file.exists():
        raise ValueError(incomplete(Path(path), "a model's folder", CONFIG_FILE))
    values = read_json(file)
    if not isinstance(values, dict) or not isinstance(values.get("model"), str):
        if (otherwise := of_transformers(Path(path))) is not None:
            raise ValueError(otherwise)
        raise ValueError(f"{file} does not name a kind of model, but must be an object with a 'model'")
    return values


def load_weights(model: nn.Module, file: Path, documents: Callable[[str], object] | None = None) -> None:
    """Fill `model` from a safetensors file, after converting it to the floating-point types of the file.

    Raises:
        ValueError: as `load_tensors`, or the file does not hold exactly the tensors of `model`.
    """
    found = load_tensors(file, documents)
    check_tensors(model.state_dict(), found, file)
    for name, x in model.state_dict(keep_vars=True).items():
        if x.is_floating_point():
            x.data = x.data.to(found[name].dtype)
    model.load_state_dict(found)


def check_tensors(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], file: Path) -> None:
    """Check the tensors that were found in a file against those of a model.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape or kind of type.
    """
    if missing := sorted(own.keys() - found.keys()):
        raise ValueError(f"{file} lacks {len(missing)} tensors of this model, the first is {missing[0]!r}")
    if unknown := sorted(found.keys() - own.keys()):
        raise ValueError(f"{file} holds {len(unknown)} tensors unknown to this model, first {unknown[0]!r}")
    for name, x in own.items():
        if found[name].shape != x.shape:
            raise ValueError(
                f"{name} in {file} has shape {list(found[name].shape)}, but must have {list(x.shape)}"
            )
        same_kind = found[name].is_floating_point() if x.is_floating_point() else found[name].dtype == x.dtype
        if not same_kind:
            kind = "a floating-point type" if x.is_floating_point() else x.dtype
            raise ValueError(f"{name} in {file} is {found[name].dtype}, but must be {kind}")


def build_config(config_type: type[Config], values: Mapping[str, object], file: Path) -> Config:
    """Make a config from the values in `file`, which must be those of all its fields and no others.

    Raises:
        ValueError: a field is missing, unknown or out of range.
    """
    known = {f.name for f in fields(config_type)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{file} has the unknown keys {unknown}, but may have only {sorted(known)}")
    if missing := sorted(known - values.keys()):
        raise ValueError(f"{file} lacks the keys {missing}: it is not as it was saved")
    make: Callable[..., Config] = config_type
    with _naming(file):
        return make(**values)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Put the name of the file in front of an error about one of its values."""
    try:
        yield
    except (ValueError, UnsupportedError) as error:
        kind = UnsupportedError if isinstance(error, UnsupportedError) else ValueError
        raise kind(f"{file} cannot be used: {error}") from error


def build(kind: type[Model], values: dict[str, object], file: Path, weights: Path) -> Model:
    """Build the model of a config, unless that takes much more memory than the weights do.

    Raises:
        ValueError: building takes that much, or a value in `file` is missing, unknown or out of range.
    """
    shapes = read_header(weights).shapes
    too_large = f"{file} describes a larger model than {weights} holds"
    n_layers = values.get("n_layers", 0)
    if isinstance(n_layers, int) and n_layers > len(shapes):  # each has at least one tensor
        raise ValueError(f"{too_large}: n_layers is {n_layers}, but there are {len(shapes)} tensors")
    config = build_config(kind.config_type, values, file)
    try:
        with budget(sum(torch.Size(shape).numel() for shape in shapes.values())), _naming(file):
            return kind(config)
    except OverBudgetError as error:
        raise ValueError(too_large) from error


def read_json(file: Path) -> object:
    """Read a JSON file.

    Raises:
        ValueError: the file does not exist, or is not JSON.
    """
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"), parse_int=_integer)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    return value


def _integer(digits: str) -> int:
    value = int(digits)
    if abs(value) >= 2**63:  # larger than any size; torch's own error is several lines long
        raise ValueError(f"the integer {digits} has more than 64 bits")
    return value


def _refuse(value: object) -> None:
    raise ValueError(
        f"the config holds a {type(value).__name__}, which is not JSON-serialisable: give its name instead"
    )
