"""Models as folders: `config.json` says what to build, `model.safetensors` holds the weights."""

import json
import os
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class SavedModel(nn.Module):
    """A module that is made from a config and can be written to and read from a folder."""

    model_name: ClassVar[str]
    config_type: ClassVar[type[Any]]  # a dataclass, whose fields JSON can say

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save(self, path: str | Path) -> None:
        """Write the model into the folder `path`, made if needed. A crash leaves no file half-written.

        Raises:
            ValueError: the config holds an object that JSON cannot say.
        """
        values = {"model": self.model_name, **asdict(self.config)}
        config = json.dumps(values, indent=2, default=_refuse) + "\n"
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        config_file = folder / CONFIG_FILE
        if config_file.exists() and config_file.read_text() != config:
            config_file.unlink()  # first, or a crash could pair another model's config with these weights
        weights = {name: x.detach().contiguous() for name, x in self.state_dict().items()}
        write_atomically(folder / WEIGHTS_FILE, lambda file: save_file(weights, file))
        write_atomically(config_file, lambda file: file.write_text(config))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model that `save` wrote, on the CPU and in the floating type it was saved in.

        Raises:
            ValueError: the folder holds no model or one of another class, a file is damaged, the config has
                an unknown or a missing key, or a tensor is missing, unknown or of another shape.
        """
        values = read_config(path)
        if (name := values.pop("model")) != cls.model_name:
            raise ValueError(f"{path} holds a model of the kind {name!r}, wanted {cls.model_name!r}")
        model = cls(_build_config(cls.config_type, values, Path(path) / CONFIG_FILE))
        load_weights(model, Path(path) / WEIGHTS_FILE)
        return model


def read_config(path: str | Path) -> dict[str, Any]:
    """Read `config.json` of the model folder `path`: its "model" names the kind, the rest is the config."""
    file = Path(path) / CONFIG_FILE
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{path} is not a model's folder: {CONFIG_FILE}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model"), str):
        raise ValueError(
            f"{file} does not say which kind of model it is for, wanted an object with a 'model'"
        )
    return values


def load_weights(model: nn.Module, file: str | Path) -> None:
    """Fill `model` from a safetensors file, after converting it to the file's floating type.

    Raises:
        ValueError: the file is missing, damaged, or does not hold exactly the tensors of `model`.
    """
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    wanted = model.state_dict()
    if missing := sorted(wanted.keys() - found.keys()):
        raise ValueError(f"{file} lacks {len(missing)} tensors of this model, the first is {missing[0]!r}")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise ValueError(f"{file} holds {len(unknown)} tensors unknown to this model, first {unknown[0]!r}")
    for name, x in wanted.items():
        if found[name].shape != x.shape:
            raise ValueError(
                f"{name} in {file} has the shape {list(found[name].shape)}, wanted {list(x.shape)}"
            )
    floating = {x.dtype for x in found.values() if x.is_floating_point()}
    if len(floating) == 1:
        model.to(floating.pop())
    model.load_state_dict(found)


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then move it to `file` in one step."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _build_config(config_type: type[Any], values: dict[str, Any], file: Path) -> Any:
    known = {f.name: f for f in fields(config_type)}
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(f"{file} has the unknown keys {unknown}, wanted some of {sorted(known)}")
    required = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - values.keys()):
        raise ValueError(f"{file} lacks the keys {missing}")
    return config_type(**values)


def _refuse(value: object) -> None:
    raise ValueError(f"the config holds a {type(value).__name__}, wanted what JSON can say, such as its name")
