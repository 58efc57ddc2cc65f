"""A package as a registry: each module holds a class, which is loaded by the module's name."""

import importlib
import inspect
import pkgutil
import sys
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes of one package that derive from `base`.

    Files that begin with an underscore, and `base.py`, hold shared code.

    Args:
        package: name of the package.
        base: the base class of the classes.
        noun: the word for such a class in error messages.
    """

    def __init__(self, package: str, base: type[T], noun: str) -> None:
        self.package, self.base, self.noun = package, base, noun

    def names(self) -> list[str]:
        """List the names, in alphabetical order."""
        path = importlib.import_module(self.package).__path__
        return sorted(filter(_is_public, (module.name for module in pkgutil.iter_modules(path))))

    def load(self, name: str) -> type[T]:
        """Return the first class of the file `name`; "name.Variant" is another class of the same file.

        Raises:
            ValueError: there is no such file or variant.
        """
        file, _, variant = name.partition(".") if isinstance(name, str) else (name, "", "")
        # Listing the folder takes as long as making a small layer, so it is listed for new names only.
        loaded = f"{self.package}.{file}" in sys.modules and _is_public(file)
        if not loaded and file not in self.names():
            raise ValueError(f"{self.noun} is {name!r}, but must be one of {', '.join(self.names())}")
        module = importlib.import_module(f"{self.package}.{file}")
        found = {
            each.__name__: each
            for each in filter(inspect.isclass, vars(module).values())  # in the order of the file
            if each.__module__ == module.__name__ and issubclass(each, self.base)
        }
        if not found:
            raise ValueError(f"{module.__name__} has no class that derives from {self.base.__name__}")
        if variant and variant not in found:
            raise ValueError(f"{self.noun} is {name!r}, but {file} has {', '.join(found)}")
        return found[variant] if variant else next(iter(found.values()))


def _is_public(file: str) -> bool:
    return not file.startswith("_") and file != "base"
