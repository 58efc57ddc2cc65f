"""One file per recurrent cell or memory: the directory is the registry, and a file's name is the cell's.

`Stacked` puts layers of them on top of each other, and `Bidirectional` side by side, one from each end.
"""

import importlib
import inspect
import pkgutil

from unrolled.recurrent._bidirectional import Bidirectional, BidirectionalState
from unrolled.recurrent._layer import RecurrentLayer
from unrolled.recurrent._stacked import Stacked, StackedState

__all__ = [
    "Bidirectional",
    "BidirectionalState",
    "RecurrentLayer",
    "Stacked",
    "StackedState",
    "load",
    "names",
]


def names() -> list[str]:
    """List the cells, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> type[RecurrentLayer]:
    """Return the layer of a cell: the one class of its file that derives from `RecurrentLayer`.

    Raises:
        ValueError: there is no cell of that name.
    """
    if name not in names():
        raise ValueError(f"cell is {name!r}, but must be one of {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    for _, found in inspect.getmembers(module, inspect.isclass):
        if found.__module__ == module.__name__ and issubclass(found, RecurrentLayer):
            return found
    raise ValueError(f"{module.__name__} has no class that derives from RecurrentLayer")
