"""Fields of configs: each is checked against its annotation when the config is made.

The annotations are ordinary types, with ranges from the library annotated-types: `Annotated[int, Ge(1)]`.
pydantic checks them in strict mode: True is not an integer, "4" is not a number, and NaN and infinity are
rejected. pydantic is imported when the first config is made, since importing it takes longer than importing
the whole package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

if TYPE_CHECKING:
    from pydantic import TypeAdapter

INT64_MAX = 2**63 - 1  # torch takes no larger integer

Size = Annotated[int, Ge(1), Le(INT64_MAX)]
Count = Annotated[int, Ge(0), Le(INT64_MAX)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
"""A probability or share below 1."""


@dataclass(frozen=True)
class FromData:
    """Marks a field of a model's config whose value is an attribute of the data set, with this name."""

    name: str


NOUNS = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "string": ("a string", "strings"),
    "array": ("a list", "lists"),
    "object": ("a dict", "dicts"),
}


class Checked:
    """Base class of dataclasses whose fields are checked on construction.

    A subclass with checks of its own, such as those between fields, calls this `__post_init__` first.

    Raises:
        ValueError: a field does not have the type of its annotation, or is out of range.
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
    """Raise ValueError unless `value` has the type and range of an annotation."""
    from pydantic import ValidationError

    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        expected = describe(json_schema(hint))
        if type(value) is int and abs(value) > INT64_MAX and expected.startswith("an integer"):
            expected = "an integer of 64 bits"
        if isinstance(value, int | float) and "a path" in expected:  # from YAML
            expected += "; a name like 3.5 needs quotes"
        raise ValueError(f"{name} is {value!r}, but must be {expected}") from error


def json_schema(hint: object) -> dict[str, Any]:
    """Return the JSON Schema of an annotation."""
    return _adapter(hint).json_schema()


@cache
def _adapter(hint: Any) -> "TypeAdapter[object]":
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def describe(schema: Mapping[str, Any], *, plural: bool = False) -> str:
    """Describe what a JSON Schema accepts, such as "an integer of at least 1, or None"."""
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
    """Describe the items of a list or the values of a dict."""
    item = schema.get("items") or schema.get("additionalProperties")
    if "prefixItems" in schema:  # a tuple, whose items all have one type
        item = schema["prefixItems"][0]
    if item in (None, True, {}):
        return ""
    least, most = schema.get("minItems"), schema.get("maxItems")
    count = ""
    if least is not None:
        count = f"{least} " if least == most else f"{least} to {most} " if most else f"{least} or more "
    return f" of {count}{describe(item, plural=True)}"


def _range(schema: Mapping[str, Any]) -> str:
    """Describe the range of a number."""
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
