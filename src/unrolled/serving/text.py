"""Conversion between text and ids, by the vocabulary of a run or a Hugging Face tokenizer."""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unrolled.data import VOCABULARY_FILE, TokenTexts, Vocabulary, byte_letters
from unrolled.extras import how_to_install
from unrolled.folders import TEMPLATE_FILE
from unrolled.serving.snapshot import MOST_HELD

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"
BYTE = re.compile("<0x([0-9A-F]{2})>")  # names of tokens that are bytes, in tokenizers of the Llama type
_BYTES = [bytes([id]) for id in range(256)]
BEFORE = ("\n", ".")  # texts that tokenizers hardly ever join to the next text


class Reader(Protocol):
    """Decodes one sequence while its ids arrive."""

    @property
    def held(self) -> list[int]:
        """The last ids, if the text of them is not complete."""

    def __call__(self, ids: list[int], final: bool = False) -> str:
        """Return the text that is complete with these ids.

        Args:
            ids: the next ids.
            final: whether these are the last ids, so that incomplete bytes become U+FFFD.
        """


class Text(Protocol):
    """Encodes text to the ids of a model, and decodes ids.

    Attributes:
        ends: token sequences that end a text, such as `</s>`; each is a single token.
        chat_template: Jinja template; None if the model has none.
        special_tokens: special tokens by the names that chat templates use, such as `bos_token`.
        of_numbers: whether the texts are the ids themselves, as numbers with spaces between them.
    """

    of_numbers: bool
    ends: list[list[int]]
    chat_template: str | None
    special_tokens: dict[str, str]

    def encode(self, text: str, *, special: bool = False, within: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            text: the text.
            special: whether characters that spell a special token are that token, as a chat template writes
                it. Without it, the tokenizer of a run reads them as characters.
            within: whether the text follows another text: then a tokenizer that puts a space before each
                text does not put one before this text.

        Raises:
            ValueError: the text has a character outside the vocabulary.
        """

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""

    def reader(self, before: Sequence[int] = (), held: Sequence[int] = ()) -> Reader:
        """Return a decoder of the ids that follow the ids `before`.

        Args:
            before: ids that have been decoded already, or the last of them: what a token adds to a text may
                depend on the token before it. Without any, the ids begin a text.
            held: what the decoder of the ids `before` held at their end: the character is completed.
        """

    def piece(self, id: int) -> str:
        """Return the text of one token; `bytes:\\xc3` or another unique name for a part of a character."""

    def piece_bytes(self, id: int) -> list[int] | None:
        """Return the bytes of one token; None if they are unknown."""


class VocabularyText:
    """Characters, bytes or plain numbers, as in `vocabulary.json`.

    Args:
        vocabulary: a vocabulary of the kind "text" or "ids".
        folder: the run folder; its `chat_template.jinja` is used if there is one.

    Raises:
        ValueError: the vocabulary is of another kind.
    """

    def __init__(self, vocabulary: Vocabulary, folder: Path | None = None) -> None:
        if vocabulary.kind not in ("text", "ids"):
            raise ValueError(f"vocabulary is of the kind {vocabulary.kind!r}, but must be 'text' or 'ids'")
        self._vocabulary = vocabulary
        self._bytes = vocabulary.kind == "text" and vocabulary.characters is None
        self.of_numbers = vocabulary.kind == "ids"
        self.ends: list[list[int]] = []
        self.special_tokens: dict[str, str] = {}
        self.chat_template = None if folder is None else _template(folder)

    def encode(self, text: str, *, special: bool = False, within: bool = False) -> list[int]:
        """Return the ids of a text; there are no special tokens, and no space is put before a text."""
        return self._vocabulary.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self.reader()(ids, final=True)

    def reader(self, before: Sequence[int] = (), held: Sequence[int] = ()) -> Reader:
        """Return a decoder of one sequence."""
        return _BytesReader(_BYTES, held) if self._bytes else _EachReader(self._vocabulary.reader())

    def piece(self, id: int) -> str:
        """Return the character of an id, ` 17` for a number, or `bytes:\\xc3` for a part of a character."""
        if self._bytes:
            return chr(id) if id < 128 else _named([id])
        return self._vocabulary.reader()(id)

    def piece_bytes(self, id: int) -> list[int] | None:
        """Return the bytes of one token."""
        return [id] if self._bytes else list(self.piece(id).encode())


class TokenizerText:
    """A Hugging Face tokenizer; special tokens have no text.

    Args:
        folder: a folder with `tokenizer.json`, and optionally `tokenizer_config.json`,
            `generation_config.json` and `chat_template.jinja`.
        vocabulary: a vocabulary of the kind "tokenizer", whose tokenizer replaces `tokenizer.json`.

    Raises:
        ImportError: the library `tokenizers` is not installed.
        ValueError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary | None = None) -> None:
        if vocabulary is None:
            self._tokenizer = _tokenizer(folder / "tokenizer.json", None)
        else:
            self._tokenizer = _tokenizer(folder / VOCABULARY_FILE, vocabulary.text_tokenizer.to_json())
        self._vocabulary, self.of_numbers = vocabulary, False
        self._contents = None if vocabulary is None else vocabulary.text_tokenizer.contents
        self._texts = TokenTexts(self._tokenizer)
        self._described = cache(self._describe)
        config = _json(folder / "tokenizer_config.json")
        named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
        self.special_tokens = {name: value for name, value in named.items() if value is not None}
        given = _json(folder / "generation_config.json").get("eos_token_id")
        ends = set(given if isinstance(given, list) else [] if given is None else [given])
        if (end := self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))) is not None:
            ends.add(end)
        if vocabulary is not None and vocabulary.end is not None:
            ends.add(vocabulary.end)
            self.special_tokens.setdefault("eos_token", self.piece(vocabulary.end))
        self.ends = [[end] for end in sorted(ends)]
        self.chat_template = _template(folder) or _default_template(config.get("chat_template"))

    def encode(self, text: str, *, special: bool = False, within: bool = False) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        ids = self._encode(text, special)
        if within and (read := self._texts.after(self._texts.any, ids)).startswith(" "):
            for earlier in BEFORE:
                known, found = self._encode(earlier, special), self._encode(earlier + text, special)
                rest = found[len(known) :]
                if found[: len(known)] == known and self._texts.after(self._texts.any, rest) == read[1:]:
                    return rest
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._vocabulary is not None and not special:
            return self._vocabulary.encode(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not Unicode at character {error.start}") from error
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises no other type, as for a character without an id
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from error
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        if self._contents is not None:
            return self.reader()(ids, final=True)
        text: str = self._tokenizer.decode(ids)
        return text

    def reader(self, before: Sequence[int] = (), held: Sequence[int] = ()) -> Reader:
        """Return a decoder of the ids that follow the ids `before`."""
        if self._contents is not None:
            return _BytesReader(self._contents, held)
        return self._texts.reader(before, held)

    def piece(self, id: int) -> str:
        """Return the text of a token, the name of a special one, `bytes:\\xc3` for a part of a character."""
        return self._described(id)[0]

    def piece_bytes(self, id: int) -> list[int] | None:
        """Return the bytes of one token; None for a part of a character whose bytes are unknown."""
        return self._described(id)[1]

    def _describe(self, id: int) -> tuple[str, list[int] | None]:
        name: str | None = self._tokenizer.id_to_token(id)
        if name is None:
            return f"token:{id}", []
        if id in self._texts.special:
            return name, list(name.encode())
        text = self._texts.within(id)
        if BROKEN not in text:
            return text or name, list(text.encode())
        found = self._bytes_of(id, name)
        return (name, None) if found is None else (_named(found), found)

    def _bytes_of(self, id: int, name: str) -> list[int] | None:
        """Return the bytes of a part of a character, if the kind of tokenizer tells them."""
        if self._contents is not None:
            return list(self._contents[id])
        if match := BYTE.fullmatch(name):
            return [int(match[1], 16)]
        letters = byte_letters()
        return [letters[x] for x in name] if letters.keys() >= {*name} else None


class _BytesReader:
    """Decodes tokens that are sequences of bytes."""

    def __init__(self, contents: Sequence[bytes], held: Sequence[int]) -> None:
        self._contents, self._utf8 = contents, codecs.getincrementaldecoder("utf-8")("replace")
        self.held: list[int] = []
        self(held)

    def __call__(self, ids: Sequence[int], final: bool = False) -> str:
        told = []
        for id in ids:
            if id < len(self._contents) and (content := self._contents[id]):
                told.append(self._utf8.decode(content))
                self.held = [*self.held, id][-MOST_HELD:] if self._utf8.getstate()[0] else []
        if final:
            told.append(self._utf8.decode(b"", final))
            self.held = []
        return "".join(told)


def _named(found: Sequence[int]) -> str:
    """Name the bytes of a part of a character as OpenAI does, in `bytes:\\xc3`."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class _EachReader:
    """Decodes tokens that have a text each."""

    def __init__(self, read: Callable[[int], str]) -> None:
        self._read, self.held = read, list[int]()

    def __call__(self, ids: Sequence[int], final: bool = False) -> str:
        return "".join(map(self._read, ids))


def _tokenizer(path: Path, content: str | None) -> "Tokenizer":
    """Make a tokenizer of `content`, or of the file if `content` is None; `path` is for errors too."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"{path} needs tokenizers, which is missing: {how_to_install('serve')}") from error
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8") if content is None else content)
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}") from error
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is damaged: {error}") from error
    tokenizer.no_truncation()  # as in transformers, which truncates only on request, whatever the file says
    tokenizer.no_padding()
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it must hold a JSON object")
    return found


def _template(folder: Path) -> str | None:
    path = folder / TEMPLATE_FILE
    return path.read_text(encoding="utf-8") if path.exists() else None


def _default_template(given: Any) -> str | None:
    """Return the default template of a tokenizer's config, which may have several templates by name."""
    if isinstance(given, list):
        given = {x.get("name"): x.get("template") for x in given if isinstance(x, dict)}.get("default")
    return given if isinstance(given, str) else None


def _content(value: Any) -> str | None:
    """Return the text of a special token, which may be given as an object with properties."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
