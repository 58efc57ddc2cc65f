"""The base class of data sets, and the tensors of each task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from typing import ClassVar, Literal

from unrolled.contract import Batch, Split
from unrolled.data._vocabulary import Vocabulary
from unrolled.fields import Checked

Task = Literal["tokens", "labels", "translation", "answers", "bits", "numbers", "transcription"]
"""What a model predicts, which determines the tensors of a batch.

    tokens         inputs: ids [B,T]; targets: the id to predict after each, [B,T]
    labels         inputs: ids [B,T]; targets: one label for each row, [B]; key_padding_mask [B,T]
    translation    inputs: ids of the source [B,S]; targets: ids of its translation and an end symbol, [B,T];
                   key_padding_mask [B,S], of the source
    answers        inputs: word ids of the sentences of a story, the question last, [B,N,J];
                   targets: one answer for each row, [B], or the answer and then the places of the F
                   sentences that it follows from, [B,1+F]; key_padding_mask [B,N,J]
    bits           inputs: numbers [B,T,n]; targets: bits, as numbers, [B,T,m]
    numbers        inputs: numbers [B,T,n]; targets: one number for each row, [B]
    transcription  inputs: features of the frames of a sound, [B,T,F]; targets: ids of what is said, [B,U];
                   key_padding_mask [B,T]

Ids are int64, numbers fp32. A target is -100 (`unrolled.contract.IGNORED`) where nothing is predicted.
`key_padding_mask` is True at padding, and None if there is no padding.

Fields of a model's config that follow from the data are marked `unrolled.fields.FromData` with the name of an
attribute of the data set. The data sets of each task have these attributes:

    tokens         vocab_size: number of ids that can be predicted; longest: maximum number of tokens of an
                   example; start_token: whether inputs begin with the id vocab_size, which is never predicted
    labels         vocab_size, longest; n_classes: number of labels
    translation    vocab_size, longest; source_vocab_size: number of ids of the source, None if both languages
                   have the same ids
    answers        vocab_size; memory_size: maximum number of sentences of a story; supporting: F
    bits           input_size: n; output_size: m
    numbers        input_size: n; output_size: 1
    transcription  vocab_size; n_mels: F
"""


class BaseDataset(Checked, ABC):
    """A data set of this folder: a dataclass whose fields are its options.

    No method uses a global random generator.
    """

    task: ClassVar[Task]
    recipe: ClassVar[str] = "classic"
    """The default recipe of `unrolled train`, for models that have recipes."""

    @property
    def name(self) -> str:
        """The name for `unrolled.data.load`: that of the module."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def options(self) -> dict[str, object]:
        """The values of the options, by name."""
        return {field.name: vars(self)[field.name] for field in fields(self)}  # type: ignore[arg-type]

    @property
    def vocabulary(self) -> Vocabulary:
        """The meaning of the ids in its batches; by default, plain numbers."""
        return Vocabulary("ids", data=self.name)

    @property
    def ids_checksum(self) -> str | None:
        """Checksum of the ids of both splits, for the user's own files; None for drawn or published data."""
        return None

    @property
    def longest(self) -> int:
        """Maximum number of tokens of an example to train on or to validate, where `length` limits them."""
        return self.length  # type: ignore[attr-defined, no-any-return]

    @abstractmethod
    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return batch number `step`, counted from 0; a pure function of its arguments."""

    @abstractmethod
    def epoch_size(self, split: Split) -> int:
        """Return the number of examples that count as one pass over a split."""

    @abstractmethod
    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the whole validation split in order, each example once; the last batch may be smaller."""

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the test split in order; by default there is none."""
        return iter(())
