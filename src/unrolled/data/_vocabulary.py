"""The meaning of token ids, saved in the folder of a run, so that generation needs no data files."""

import codecs
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from annotated_types import Len, MinLen
from torch import Tensor

from unrolled.data._bpe import BytePairs
from unrolled.data._codec import Codec
from unrolled.fields import Checked, Size

if TYPE_CHECKING:
    from unrolled.models.saving import SavedModel

FILE_NAME = "vocabulary.json"

Model = TypeVar("Model", bound="SavedModel")
Kind = Literal["text", "bpe", "image", "ids"]
Character = Annotated[str, Len(1, 1)]


@dataclass(frozen=True)
class Vocabulary(Checked):
    """The meaning of ids; the fields are those of the file.

    Attributes:
        kind: "text", "bpe" (byte pairs), "image" or "ids" (plain numbers).
        characters: of a text, in the order of their ids; None for the bytes of UTF-8.
        pieces: of byte pairs, the output of `BytePairs.to_json`.
        shape: of an image, height and width.
        data: name of the data set, for a text that of its file; None if unknown.

    Raises:
        ValueError: a field has another type, or does not fit the kind.
    """

    kind: Kind
    characters: Annotated[list[Character], MinLen(1)] | None = None
    pieces: str | None = None
    shape: Annotated[list[Size], Len(2, 2)] | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("pieces", "bpe"), ("shape", "image")):
            value = vars(self)[name]
            if (value is None) == (self.kind == kind):
                expected = "given" if value is None else "None"
                raise ValueError(f"{name} is {value!r}, but must be {expected} with kind {self.kind!r}")
        if self.characters is not None and len(set(self.characters)) < len(self.characters):
            raise ValueError("characters has one of them twice, but must have each once")

    def attach(self, model: Model) -> Model:
        """Make `model.save` write it next to the weights, as `vocabulary.json`; return the model."""
        model.documents[FILE_NAME] = asdict(self)
        return model

    @classmethod
    def load(cls, run_dir: Path) -> "Vocabulary":
        """Read `vocabulary.json`.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        path = run_dir / FILE_NAME
        if not path.exists():
            raise ValueError(f"{run_dir} is not a run of unrolled train: it has no {FILE_NAME}")
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return found

    def check(self, vocab_size: int) -> None:
        """Reject a model with another number of ids.

        Raises:
            ValueError: the numbers differ.
        """
        size = vocab_size
        if self.kind == "text":
            size = 256 if self.characters is None else len(self.characters)
        if self.kind == "bpe" and len(self._byte_pairs) > vocab_size:  # fewer if the text was short
            size = len(self._byte_pairs)
        if size != vocab_size:
            raise ValueError(
                f"{FILE_NAME} has {size} ids, but the model has {vocab_size}: they are not of one run"
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text: of its characters, bytes or byte pairs, or the numbers written in it.

        Byte pairs end with the end symbol.

        Raises:
            ValueError: the text has a character outside the vocabulary, or anything but numbers.
        """
        if self.kind == "text":
            ids: list[int] = Codec(self.characters).encode(text).tolist()
            return ids
        if self.kind == "bpe":
            pieces: list[int] = self._byte_pairs.encode(text).tolist()
            return pieces
        try:
            return [int(number) for number in text.split()]
        except ValueError as error:
            raise ValueError(f"{text!r} must be ids, whole numbers with spaces between") from error

    def decode(self, ids: Tensor) -> str:
        """Return the text of ids [T], of byte pairs up to the end symbol."""
        if self.kind == "bpe":
            return self._byte_pairs.decode(ids)
        read = self.reader()
        return "".join(map(read, ids.tolist()))

    @cached_property
    def _byte_pairs(self) -> BytePairs:
        return BytePairs.of_json(self.pieces or "")

    def reader(self) -> Callable[[int], str]:
        """Return a function that decodes one id at a time; bytes appear once their character is complete."""
        if self.kind == "ids":
            return lambda token: f" {token}"
        if self.characters is None:
            utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda token: utf8.decode(bytes([token]))
        codec = Codec(self.characters)
        return lambda token: codec.decode([token])
