"""Fields of configs: each is checked against its annotation when the config is made.

The annotations are ordinary types, with ranges as of the library annotated-types: `Annotated[int, Ge(1)]`.
pydantic checks them, strictly: True is no integer, "4" no number, and NaN and infinity are none either. It is
imported with the first config, since it costs more than the whole package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

INT64_MAX = 2**63 - 1  # torch takes no larger integer

Size = Annotated[int, Ge(1), Le(INT64_MAX)]
Count = Annotated[int, Ge(0), Le(INT64_MAX)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
"""A probability or part that is never all."""


@dataclass(frozen=True)
class FromData:
    """Marks a field of a model's config that follows from the data set: from its attribute of this name."""

    name: str


NOUNS = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "string": ("a string", "strings"),
    "array": ("a list", "lists"),
    "object": ("a dict", "dicts"),
}


class Checked:
    """A dataclass derives from it to have its fields checked when it is made.

    A subclass with rules of its own, as those that hold between fields, calls this `__post_init__` first.

    Raises:
        ValueError: a field has another type than its annotation says, or is out of range.
    """

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():
            check_value(name, vars(self)[name], hint)


def field_types(config_type: type) -> dict[str, object]:
    """Return the annotation of each field of a dataclass, by name and in order."""
    return _field_types(config_type)


@cache
def _field_types(config_type: type) -> dict[str, object]:
    hints = get_type_hints(config_type, include_extras=True)
    return {field.name: hints[field.name] for field in fields(config_type)}


def check_value(name: str, value: object, hint: object) -> None:
    """Raise ValueError unless `value` has the type and is in the range that an annotation says."""
    from pydantic import ValidationError

    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        wanted = describe(json_schema(hint))
        if type(value) is int and abs(value) > INT64_MAX and wanted.startswith("an integer"):
            wanted = "an integer of 64 bits"
        raise ValueError(f"{name} is {value!r}, but must be {wanted}") from error


def json_schema(hint: object) -> dict[str, Any]:
    """Return the JSON Schema of an annotation."""
    schema: dict[str, Any] = _adapter(hint).json_schema()
    return schema


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def describe(schema: Mapping[str, Any], *, plural: bool = False) -> str:
    """Say in words what a JSON Schema accepts, such as "an integer of at least 1, or None"."""
    if "anyOf" in schema:
        *parts, last = dict.fromkeys(describe(part, plural=plural) for part in schema["anyOf"])
        return f"{', '.join(parts)}, or {last}" if parts else last
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    kind = schema.get("type")
    if kind == "null":
        return "None"
    if kind == "boolean":
        return "True or False"
    if schema.get("format") == "path":
        return "paths" if plural else "a path"
    if kind == "string" and schema.get("maxLength") == 1:
        return "characters" if plural else "a character"
    return NOUNS[str(kind)][plural] + _content(schema) + _range(schema)


def _content(schema: Mapping[str, Any]) -> str:
    """Say what the items of a list or the values of a dict are."""
    item: Any = schema.get("items") or schema.get("additionalProperties")
    if "prefixItems" in schema:  # a tuple, whose items are all alike
        item = schema["prefixItems"][0]
    if item in (None, True, {}):
        return ""
    least, most = schema.get("minItems"), schema.get("maxItems")
    count = ""
    if least is not None:
        count = f"{least} " if least == most else f"{least} to {most} " if most else f"{least} or more "
    return f" of {count}{describe(item, plural=True)}"


def _range(schema: Mapping[str, Any]) -> str:
    """Say between which bounds a number lies."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if high == INT64_MAX:
        high = None
    bounds = {"of at least": low, "above": above, "of at most": high, "below": below}
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    if len(given) < 2:
        return "".join(f" {word} {bound}" for word, bound in given.items())
    if given.keys() == {"of at least", "of at most"}:
        return f" from {low} to {high}"
    left = f"({above}" if low is None else f"[{low}"
    right = f"{below})" if high is None else f"{high}]"
    return f" in {left}, {right}"
