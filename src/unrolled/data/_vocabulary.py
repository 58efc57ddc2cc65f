"""The meaning of token ids, saved in the folder of a run, so that generation needs no data files."""

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import torch
from annotated_types import Len, MinLen
from torch import Tensor

from unrolled.data._bpe import BytePairs
from unrolled.data._codec import Codec, ids_below, listed
from unrolled.data._sound import FULL_SCALE, log_mel, read_sound
from unrolled.data._tokenizer import TextTokenizer
from unrolled.fields import Checked, Count, Size
from unrolled.folders import incomplete

if TYPE_CHECKING:
    from unrolled.models.saving import SavedModel

FILE_NAME = "vocabulary.json"

Model = TypeVar("Model", bound="SavedModel")
Kind = Literal["text", "tokenizer", "bpe", "image", "ids", "speech"]
Character = Annotated[str, Len(1, 1)]


@dataclass(frozen=True)
class Vocabulary(Checked):
    """The meaning of ids; the fields are those of the file.

    Attributes:
        kind: "text" (characters or bytes), "tokenizer" (of a language model), "bpe" (byte pairs of sentences
            to be translated), "image", "speech" or "ids" (plain numbers).
        characters: for "text", the characters in the order of their ids; None for the bytes of UTF-8.
        tokenizer: for "tokenizer", the text of a `tokenizer.json`.
        end: for "tokenizer", the id that ends a document; None if there is none.
        pieces: for "bpe", the output of `BytePairs.to_json`.
        shape: for "image", the height and width, and then 3 for colour.
        units: for "speech", what the ids stand for: phones, letters or words.
        rate: for "speech", samples per second.
        n_mels: for "speech", features of a frame.
        counted: for "speech", the unit of the error rate: "phone" or "word". Spaces separate these units.
        data: name of the data set, or of the file of a text; None if unknown.

    Raises:
        ValueError: a field has another type, or does not fit the kind.
    """

    kind: Kind
    characters: Annotated[list[Character], MinLen(1)] | None = None
    pieces: str | None = None
    shape: Annotated[list[Size], Len(2, 3)] | None = None
    data: str | None = None
    tokenizer: str | None = None
    end: Count | None = None
    units: Annotated[list[str], MinLen(1)] | None = None
    rate: Size | None = None
    n_mels: Size | None = None
    counted: Literal["phone", "word"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"pieces": "bpe", "shape": "image", "tokenizer": "tokenizer"}
        for name, kind in (needed | dict.fromkeys(("units", "rate", "n_mels", "counted"), "speech")).items():
            value = vars(self)[name]
            if (value is None) == (self.kind == kind):
                expected = "given" if value is None else "None"
                raise ValueError(f"{name} is {value!r}, but must be {expected} with kind {self.kind!r}")
        if self.shape is not None and self.shape[2:] not in ([], [3]):
            raise ValueError(f"shape is {self.shape}, but must be height and width, and 3 in colour")
        if self.end is not None and self.kind != "tokenizer":
            raise ValueError(f"end is {self.end}, but must be None with kind {self.kind!r}")
        if self.characters is not None and len(set(self.characters)) < len(self.characters):
            raise ValueError("characters has one of them twice, but must have each once")

    @property
    def is_text(self) -> bool:
        """Whether ids stand for text that a model continues."""
        return self.kind in ("text", "tokenizer")

    @property
    def may_have_more_ids(self) -> bool:
        """Whether a model may have more ids than the vocabulary, as those of tokenizers often do."""
        return self.kind in ("tokenizer", "bpe")

    def attach(self, model: Model) -> Model:
        """Make `model.save` write this vocabulary too, as `vocabulary.json`; return the model."""
        model.documents[FILE_NAME] = asdict(self)
        return model

    @classmethod
    def load(cls, run_dir: str | Path) -> "Vocabulary":
        """Read `vocabulary.json`.

        Raises:
            ValueError: there is no such file, or it is damaged.
        """
        path = Path(run_dir) / FILE_NAME
        if not path.exists():
            raise ValueError(incomplete(path.parent, "a run of unrolled train", FILE_NAME))
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return found

    def check(self, vocab_size: int) -> None:
        """Reject a model with another number of ids.

        Raises:
            ValueError: the numbers of ids differ.
        """
        size = vocab_size
        if self.kind == "text":
            size = 256 if self.characters is None else len(self.characters)
        if self.kind == "bpe":
            size = max(len(self._byte_pairs), vocab_size)  # fewer if the text was short
        if self.units is not None:
            size = len(self.units)
        if self.kind == "tokenizer":
            size = max(len(self.text_tokenizer), vocab_size)  # a model may have more than the tokenizer uses
        if size != vocab_size:
            raise ValueError(
                f"{FILE_NAME} has {size} ids, but the model has {vocab_size}: they are not from one run"
            )

    def same_ids(self, other: "Vocabulary") -> bool:
        """Return whether ids have the same meaning in another vocabulary."""
        return self.meaning == other.meaning

    @property
    def meaning(self) -> tuple[object, ...]:
        """What ids of text stand for, in a form that can be compared."""
        names = None if self.tokenizer is None else json.loads(self.tokenizer)["model"]["vocab"]
        return (self.kind, self.characters, names, self.end)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text: of its characters, bytes or tokens, or the numbers written in it.

        Byte pairs of sentences end with the end symbol.

        Raises:
            ValueError: the text has a character outside the vocabulary, or anything but numbers.
        """
        if self.kind == "text":
            ids: list[int] = Codec(self.characters).encode(text).tolist()
            return ids
        if self.kind == "tokenizer":
            return self.text_tokenizer.encode(text)
        if self.kind == "bpe":
            pieces: list[int] = self._byte_pairs.encode(text).tolist()
            return pieces
        try:
            return [int(number) for number in text.split()]
        except ValueError as error:
            raise ValueError(f"{text!r} must be ids, whole numbers with spaces between") from error

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [T]; for byte pairs of sentences, up to the end symbol.

        Bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id of a character, a byte or a unit is outside the vocabulary.
        """
        if self.kind == "text":
            return Codec(self.characters).decode(ids)
        if self.kind == "bpe":
            return self._byte_pairs.decode(ids)
        if self.kind == "tokenizer":
            return self.text_tokenizer.decode(listed(ids))
        if self.units is not None:
            between = "" if " " in self.units else " "  # letters include the space
            return between.join(self.units[i] for i in ids_below(len(self.units), ids))
        read = self.reader()
        return "".join(map(read, listed(ids)))

    @cached_property
    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer of a language model.

        Raises:
            ImportError: the library `tokenizers` is not installed.
            ValueError: the tokenizer is damaged.
        """
        try:
            return TextTokenizer.of_json(self.tokenizer or "", self.end)
        except ValueError as error:
            raise ValueError(f"the tokenizer in {FILE_NAME} is damaged: {error}") from error

    def byte_counts(self) -> Sequence[int] | None:
        """Return how many bytes of UTF-8 each id stands for; None if this is not known for single ids."""
        if self.kind == "text":
            return [1] * 256 if self.characters is None else [len(x.encode()) for x in self.characters]
        contents = self.text_tokenizer.contents if self.kind == "tokenizer" else None
        return None if contents is None else [len(content) for content in contents]

    @cached_property
    def _byte_pairs(self) -> BytePairs:
        return BytePairs.of_json(self.pieces or "")

    def samples(self, path: str | Path) -> Tensor:
        """Return the samples of a sound file at the rate of the model, fp32 [n] from -1 to 1.

        Raises:
            ImportError: a library of the extra `speech` is not installed.
            ValueError: it is not a file of sound, or these are not ids of speech.
        """
        if self.rate is None:
            raise ValueError(f"kind is {self.kind!r}, but must be 'speech' to read sounds")
        return torch.from_numpy(read_sound(path, self.rate)) / FULL_SCALE

    def features(self, path: str | Path) -> Tensor:
        """Return the features of a sound file, the input of a model of speech, [T, n_mels].

        Raises:
            ImportError: a library of the extra `speech` is not installed.
            ValueError: it is not a file of sound, or these are not ids of speech.
        """
        if self.rate is None or self.n_mels is None:
            raise ValueError(f"kind is {self.kind!r}, but must be 'speech' to read sounds")
        return log_mel(read_sound(path, self.rate), self.rate, self.n_mels)

    def reader(self, before: Sequence[int] = ()) -> Callable[[int], str]:
        """Return a function that decodes the ids after `before`, one at a time.

        Bytes appear once their character is complete.
        """
        if self.kind == "ids":
            return lambda token: f" {token}"
        if self.kind == "tokenizer":
            return self.text_tokenizer.reader(before)
        if self.characters is None:
            utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda token: utf8.decode(bytes([token]))
        codec = Codec(self.characters)
        return lambda token: codec.decode([token])
