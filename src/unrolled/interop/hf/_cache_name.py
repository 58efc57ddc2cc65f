"""The name of the argument that passes a cache: `cache`, and before transformers 5.24 `past_key_values`."""

from dataclasses import fields
from typing import TypeVar

from transformers.modeling_outputs import BaseModelOutputWithPast

C = TypeVar("C")

OLD = "past_key_values"
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else OLD
"""The name in the installed version, of arguments and of outputs."""


def either(cache: C | None, past_key_values: C | None) -> C | None:
    """Return a cache that was given by either name.

    Raises:
        ValueError: it was given by both.
    """
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: give one of them")
    return past_key_values if cache is None else cache
