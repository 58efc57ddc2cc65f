"""One file per attention mechanism: the directory is the registry, and a file's name is the mechanism's.

Each mechanism derives from `MultiHeadAttention`, in `unrolled.attention.base`.
"""

from typing import Any

from unrolled.attention.base import MultiHeadAttention
from unrolled.registry import Registry

__all__ = ["MultiHeadAttention", "load", "names"]

_registry: Registry[MultiHeadAttention[Any, Any]] = Registry(__name__, MultiHeadAttention, "attention")


def names() -> list[str]:
    """List the mechanisms, in alphabetical order."""
    return _registry.names()


def load(name: str) -> type[MultiHeadAttention[Any, Any]]:
    """Return the class of a mechanism.

    Raises:
        ValueError: there is no mechanism of that name.
    """
    return _registry.load(name)
