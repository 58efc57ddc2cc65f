"""Data sets and synthetic tasks, one file each; the directory is the registry.

`names()` lists them and `load("mnist", data_dir="...")` makes one. The options of a data set are the fields
of its dataclass, `MnistDataset` in `mnist.py` and `CopyBitsDataset` in `copy_bits.py`. Files whose name
starts with an underscore are helpers.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

from torch import Tensor

Split = Literal["train", "val"]
Task = Literal["tokens", "labels", "translation", "answers", "bits", "numbers"]
"""What is to be predicted, which says what the tensors of a batch are.

    tokens         inputs: ids [B,T]; targets: the id that follows each, [B,T]
    labels         inputs: ids [B,T]; targets: one label for each row, [B]; key_padding_mask [B,T]
    translation    inputs: ids of the source [B,S]; targets: ids of its translation and an end symbol, [B,T];
                   key_padding_mask [B,S], of the source
    answers        inputs: word ids of the sentences of a story, the question last, [B,N,J];
                   targets: one answer for each row, [B], or the answer and then the places of F sentences
                   that it follows from, [B,1+F]; key_padding_mask [B,N,J]
    bits           inputs: numbers [B,T,n]; targets: bits, as numbers, [B,T,m]
    numbers        inputs: numbers [B,T,n]; targets: one number for each row, [B]

A target is -100 (`unrolled.contract.IGNORED`) where nothing is to be predicted; `key_padding_mask` is True at
padding.
"""


class Batch(NamedTuple):
    """Token ids to read, and what to predict: `targets[b, t]` follows `inputs[b, :t + 1]`.

    Attributes:
        inputs: [B, T], int64.
        targets: [B, T], int64; -100 (`unrolled.contract.IGNORED`) where nothing is to be predicted.
    """

    inputs: Tensor
    targets: Tensor


class LabelledBatch(NamedTuple):
    """Token ids to read, and one label for each sequence.

    Attributes:
        inputs: [B, T], int64.
        targets: [B], int64.
        key_padding_mask: [B, T], True where `inputs` has padding.
    """

    inputs: Tensor
    targets: Tensor
    key_padding_mask: Tensor


class TranslationBatch(NamedTuple):
    """Sentences to read, and their translations to predict.

    Attributes:
        inputs: [B, S], int64, the end symbol included.
        targets: [B, T], int64, the end symbol included; -100 behind it.
        key_padding_mask: [B, S], True where `inputs` has padding.
    """

    inputs: Tensor
    targets: Tensor
    key_padding_mask: Tensor


class Dataset(Protocol):
    """What training asks of a data set. Nothing here reads or moves a global random generator.

    What a model has to know of the data, a data set has under the name of the model's field: `vocab_size`
    (ids that can be predicted) and `start_token` (whether targets begin after the id `vocab_size`, a start
    symbol that is never predicted), `n_classes` of labels, `input_size` and `output_size` of numbers and
    bits. Where all examples have one length, or one bounds them, `length` is it.
    """

    task: ClassVar[Task]

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Any:
        """Return batch number `step`, counted from 0.

        A pure function of its arguments, so that a resumed run sees the data it would have seen.
        """

    def epoch_size(self, split: Split) -> int:
        """Return the number of examples that count as one pass over a split."""

    def eval_batches(self, batch_size: int) -> Iterator[Any]:
        """Yield the whole validation split in order, each example once; the last batch may be smaller."""


def names() -> list[str]:
    """List the data sets that `load` knows."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str, **options: Any) -> Dataset:
    """Make a data set by name: `load("text", path="book.txt", length=256)`.

    Raises:
        ValueError: the name or an option is unknown, an option is impossible, a file is missing or corrupt.
    """
    if name not in names():
        raise ValueError(f"name is {name!r}, but the data sets are {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    dataset = getattr(module, "".join(part.capitalize() for part in name.split("_")) + "Dataset")
    valid = [field.name for field in fields(dataset)]
    for option in options:
        if option not in valid:
            raise ValueError(
                f"{option!r} is no option of the data set {name}, which takes {', '.join(valid) or 'none'}"
            )
    return cast(Dataset, dataset(**options))
