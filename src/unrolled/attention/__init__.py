"""One file per attention mechanism: the directory is the registry, and a file's name is the mechanism's."""

import importlib
import inspect
import pkgutil

from torch import nn


def names() -> list[str]:
    """List the mechanisms, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> type[nn.Module]:
    """Return the module class of a mechanism: the first class in its file that declares `supports`.

    What follows that class in its file are named variants of it, which are imported as any class is.

    Raises:
        ValueError: there is no mechanism of that name.
    """
    if name not in names():
        raise ValueError(f"attention is {name!r}, but must be one of {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    for found in filter(inspect.isclass, vars(module).values()):  # in the order of the file
        if (
            found.__module__ == module.__name__
            and issubclass(found, nn.Module)
            and hasattr(found, "supports")
        ):
            return found
    raise ValueError(f"{module.__name__} has no class that declares `supports`")
