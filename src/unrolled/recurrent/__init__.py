"""One file per recurrent cell or memory: the directory is the registry, and a file's name is the cell's.

`Stacked` stacks layers of any cells, and `Bidirectional` runs one layer in each direction.
"""

from typing import Any

from unrolled.recurrent._bidirectional import Bidirectional, BidirectionalState
from unrolled.recurrent._layer import RecurrentLayer
from unrolled.recurrent._lstm import lstm_step
from unrolled.recurrent._stacked import Stacked, StackedState
from unrolled.registry import Registry

__all__ = [
    "Bidirectional",
    "BidirectionalState",
    "RecurrentLayer",
    "Stacked",
    "StackedState",
    "load",
    "lstm_step",
    "names",
]


_registry: Registry[RecurrentLayer[Any]] = Registry(__name__, RecurrentLayer, "cell")


def names() -> list[str]:
    """List the cells, in alphabetical order."""
    return _registry.names()


def load(name: str) -> type[RecurrentLayer[Any]]:
    """Return the layer of a cell.

    Raises:
        ValueError: there is no cell of that name.
    """
    return _registry.load(name)
