"""Data sets and synthetic tasks, one file each; the directory is the registry.

`names()` lists them and `load("mnist", data_dir="...")` makes one. The options of a data set are the fields
of its dataclass, `MnistDataset` in `mnist.py` and `CopyBitsDataset` in `copy_bits.py`. Files whose name
starts with an underscore are helpers.
"""

import importlib
import pkgutil
from dataclasses import fields
from typing import Any, cast

from unrolled.contract import Batch, Split
from unrolled.data._base import BaseDataset, Task
from unrolled.data._bpe import END_ID
from unrolled.data._bpe import SMALLEST as SMALLEST_VOCABULARY
from unrolled.data._corpus.documents import Documents
from unrolled.data._corpus.index import Index as CorpusIndex
from unrolled.data._corpus.index import is_corpus
from unrolled.data._corpus.writing import Tokenizing
from unrolled.data._files import folder as data_folder
from unrolled.data._reading import TokenTexts
from unrolled.data._tokenizer import byte_letters
from unrolled.data._vocabulary import FILE_NAME as VOCABULARY_FILE
from unrolled.data._vocabulary import Vocabulary

__all__ = [
    "END_ID",
    "SMALLEST_VOCABULARY",
    "VOCABULARY_FILE",
    "BaseDataset",
    "Batch",
    "CorpusIndex",
    "Documents",
    "Split",
    "Task",
    "TokenTexts",
    "Tokenizing",
    "Vocabulary",
    "byte_letters",
    "data_folder",
    "dataset_type",
    "is_corpus",
    "load",
    "names",
    "options_of",
]


def names() -> list[str]:
    """List the data sets that `load` knows."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def dataset_type(name: str) -> type[BaseDataset]:
    """Return the class of a data set: `Multi30kDataset` for "multi30k".

    Raises:
        ValueError: there is no data set of this name.
    """
    if name not in names():
        raise ValueError(f"name is {name!r}, but the data sets are {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    found = vars(module)["".join(part.capitalize() for part in name.split("_")) + "Dataset"]
    return cast(type[BaseDataset], found)


def options_of(name: str) -> list[str]:
    """Return the names of the options of a data set.

    Raises:
        ValueError: there is no data set of this name.
    """
    return [field.name for field in fields(cast(Any, dataset_type(name)))]


def load(name: str, **options: Any) -> BaseDataset:
    """Make a data set by name: `load("text", path="book.txt", length=256)`.

    Raises:
        ValueError: the name or an option is unknown, or an option is impossible, or a file is missing or
            corrupt.
    """
    valid = options_of(name)
    for option in options:
        if option not in valid:
            raise ValueError(
                f"{option!r} is not an option of data set {name}, which takes {', '.join(valid) or 'none'}"
            )
    return dataset_type(name)(**options)
