"""Alignment: how the decoder of a recurrent encoder-decoder attends to the source, one query at a time.

One file per mechanism: the directory is the registry, and a file's name is the mechanism's. Each mechanism
derives from `Alignment`, in `unrolled.alignment.base`.
"""

from unrolled.alignment.base import Alignment
from unrolled.registry import Registry

__all__ = ["Alignment", "load", "names"]

_registry = Registry(__name__, Alignment, "attention")  # the name of the field of a config


def names() -> list[str]:
    """List the mechanisms, in alphabetical order."""
    return _registry.names()


def load(name: str) -> type[Alignment]:
    """Return the class of a mechanism; a variant is named as in "luong.LocalPredictiveAttention".

    Raises:
        ValueError: there is no mechanism of that name, or no such variant.
    """
    return _registry.load(name)
