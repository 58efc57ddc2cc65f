"""The JSON Schema of a run's YAML file, from the declarations that `unrolled train` checks it against.

`data.name` selects the options of the data set. The task of the data set selects the models, and `model.name`
selects the fields of the model. Constraints between fields are not included.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, get_args

from unrolled import data
from unrolled.cli.recipes import names_for
from unrolled.cli.run_config import JOBS, plain
from unrolled.fields import FromData, field_types, json_schema
from unrolled.models import KINDS
from unrolled.training import TrainConfig

ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)")

Schema = dict[str, Any]


def run_schema() -> Schema:
    """Return the schema of the whole file."""
    sets = {name: data.dataset_type(name) for name in data.names()}
    kinds = [kind for job in JOBS.values() for kind in job.kinds]
    by_task = {
        task: [name for name, dataset in sets.items() if dataset.task == task] for task in get_args(data.Task)
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of unrolled train",
        "type": "object",
        **_object(
            {
                "data": {
                    "type": "object",
                    "description": "The data set and its options.",
                    **_chosen("data", sets),
                    "required": ["name"],
                },
                "model": {"type": ["object", "null"], "description": "The model; it must suit the data set."},
                "train": {"$ref": "#/$defs/train"},
                "run_dir": {
                    "type": ["string", "null"],
                    "minLength": 1,
                    "description": "The folder of the run.",
                },
            },
            required=["data"],
        ),
        "allOf": [
            {
                "if": {
                    "properties": {"data": {"properties": {"name": {"enum": names}}, "required": ["name"]}},
                    "required": ["data"],
                },
                "then": {
                    "properties": {"model": _chosen("model", JOBS[task].kinds, default=JOBS[task].kinds[0])}
                },
            }
            for task, names in by_task.items()
        ],
        "$defs": {
            **{f"data.{name}": _section(dataset) for name, dataset in sets.items()},
            **{f"model.{name}": _model(name) for name in kinds},
            "train": {**_section(TrainConfig, named=False), "type": ["object", "null"]},
        },
    }


def _object(properties: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """Return the schema of a mapping with these keys and no others, without its `type`."""
    return {"properties": dict(properties), "required": list(required), "additionalProperties": False}


def _chosen(section: str, names: Iterable[str], default: str | None = None) -> Schema:
    """Return the schema of a section whose key `name` selects one of the definitions."""
    name: Schema = {"enum": list(names)} | ({} if default is None else {"default": default})
    return {
        "properties": {"name": name},
        "allOf": [
            {
                "if": {
                    "properties": {"name": {"const": each}},
                    "required": [] if each == default else ["name"],
                },
                "then": {"$ref": f"#/$defs/{section}.{each}"},
            }
            for each in name["enum"]
        ],
    }


def _model(name: str) -> Schema:
    section = _section(KINDS[name].config_type)
    text = "Settings of model and training that train well together; by default those of the data set."
    section["properties"]["recipe"] = {"description": text, "enum": names_for(name)}
    return section


def _section(kind: Any, *, named: bool = True) -> Schema:
    """Return the schema of a dataclass, with the key `name` beside its fields if `named`."""
    hints, texts = field_types(kind), _descriptions(kind)
    properties: dict[str, Schema] = {"name": {}} if named else {}
    required = []
    for field in fields(kind):
        follows = any(isinstance(mark, FromData) for mark in get_args(hints[field.name]))
        if field.default is MISSING and field.default_factory is MISSING and not follows:
            required.append(field.name)
        text = texts.get(field.name, "") + (" By default that of the data set." if follows else "")
        properties[field.name] = (
            {"description": text.strip()}
            | json_schema(hints[field.name])
            | ({} if follows else _default(field))
        )
    return _object(properties, required)


def _default(field: Field[Any]) -> Schema:
    """Return the default of a field in JSON; an empty dict if it has none."""
    if field.default_factory is not MISSING:
        return {"default": field.default_factory()}
    if field.default is MISSING:
        return {}
    return {"default": plain(field.default)}


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the description of each field, from `Attributes:` in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        for names, text in ENTRY.findall(section.partition("\n\n")[0]):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found
