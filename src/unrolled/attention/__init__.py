"""One file per attention mechanism: the directory is the registry, and a file's name is the mechanism's."""

import importlib
import inspect
import pkgutil
from typing import Any

from torch import nn


def names() -> list[str]:
    """List the mechanisms, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def layers() -> list[str]:
    """List the mechanisms that can be layers of a transformer: all but those that only read a memory."""
    return [name for name in names() if _is_layer(load(name))]


def _is_layer(mechanism: Any) -> bool:
    return bool(mechanism.supports.causal or mechanism.supports.bidirectional)


def load(name: str) -> type[nn.Module]:
    """Return the module class of a mechanism: the first class in its file that declares `supports`.

    What follows that class in its file are variants of it, named as in "luong.LocalPredictiveAttention".

    Raises:
        ValueError: there is no mechanism of that name, or no such variant.
    """
    file, _, variant = name.partition(".") if isinstance(name, str) else (name, "", "")
    if file not in names():
        raise ValueError(f"attention is {name!r}, but must be one of {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{file}")
    found = {
        each.__name__: each
        for each in filter(inspect.isclass, vars(module).values())  # in the order of the file
        if each.__module__ == module.__name__ and issubclass(each, nn.Module) and hasattr(each, "supports")
    }
    if not found:
        raise ValueError(f"{module.__name__} has no class that declares `supports`")
    if variant and variant not in found:
        raise ValueError(f"attention is {name!r}, but {file} has {', '.join(found)}")
    return found[variant] if variant else next(iter(found.values()))
