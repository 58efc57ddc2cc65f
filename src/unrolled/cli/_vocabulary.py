"""What the token ids of a run stand for, kept in its folder so that generating needs no data file."""

import codecs
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from unrolled.data._bpe import BytePairs
from unrolled.data.text import Codec
from unrolled.models.saving import SavedModel

FILE_NAME = "vocabulary.json"


def _are(values: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(values, list) and all(map(fits, values))


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


Model = TypeVar("Model", bound=SavedModel)
Kind = Literal["text", "bpe", "image", "ids"]


@dataclass(frozen=True)
class Vocabulary:
    """Attributes as written to the file.

    Attributes:
        kind: "text", "bpe" (byte pairs), "image" or "ids" (which stand for nothing else).
        characters: of a text, in the order of their ids; None for the bytes of UTF-8.
        pieces: of byte pairs, what `BytePairs.to_json` says.
        shape: of an image, height and width.
        data: name of the data set, and of a text that of its file; None where it is not known.
    """

    kind: Kind
    characters: list[str] | None = None
    pieces: str | None = None
    shape: list[int] | None = None
    data: str | None = None

    @classmethod
    def of(cls, dataset: Any) -> "Vocabulary":
        """Describe the ids of a data set."""
        name = type(dataset).__module__.rpartition(".")[2]
        if hasattr(dataset, "shape"):
            return cls("image", shape=list(dataset.shape), data=name)
        if hasattr(dataset, "pieces"):
            return cls("bpe", pieces=dataset.pieces.to_json(), data=name)
        if hasattr(dataset, "vocabulary"):
            characters = None if dataset.vocabulary is None else list(dataset.vocabulary)
            file = Path(dataset.path).name if hasattr(dataset, "path") else name
            return cls("text", characters=characters, data=file.partition(".")[0] or name)
        return cls("ids", data=name)

    def attach(self, model: Model) -> Model:
        """Let `model.save` write it beside the weights, as `vocabulary.json`; return the model."""
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
            raise ValueError(f"{run_dir} is no folder of unrolled train: it has no {FILE_NAME}")
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if wrong := found._wrong():
            raise ValueError(f"{path} is damaged: it has kind {found.kind!r} and {wrong}")
        return found

    def _wrong(self) -> str:
        """Say what a file cannot have said; nothing where there is no such thing."""
        if self.kind not in get_args(Kind):
            return f"must have one of {', '.join(get_args(Kind))}"
        letters = self.characters
        single = _are(letters, lambda x: isinstance(x, str) and len(x) == 1)
        if letters is not None and not (letters and single):
            return "characters that are not a list of single characters"
        if letters is not None and len(set(letters)) < len(letters):
            return "characters of which some stand twice"
        if not isinstance(self.pieces, str if self.kind == "bpe" else NoneType):
            return f"pieces {self.pieces!r}"
        if not isinstance(self.data, str | NoneType):
            return f"data {self.data!r}"
        shape = self.shape
        fits = _are(shape, _is_size) and len(shape or ()) == 2
        return "" if (fits if self.kind == "image" else shape is None) else f"shape {shape!r}"

    def check(self, vocab_size: int) -> None:
        """Refuse a model that was trained on other ids.

        Raises:
            ValueError: the model has another number of them.
        """
        size = vocab_size
        if self.kind == "text":
            size = 256 if self.characters is None else len(self.characters)
        if self.kind == "bpe" and len(self._byte_pairs) > vocab_size:  # fewer, where the text was short
            size = len(self._byte_pairs)
        if size != vocab_size:
            raise ValueError(
                f"{FILE_NAME} has {size} ids, but the model beside it {vocab_size}: not of one run"
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
        """Return a function from one id after another to text; bytes appear once a character is complete."""
        if self.kind == "ids":
            return lambda token: f" {token}"
        if self.characters is None:
            utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda token: utf8.decode(bytes([token]))
        codec = Codec(self.characters)
        return lambda token: codec.decode([token])
