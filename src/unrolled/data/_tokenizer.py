"""Tokenizers of language models: byte pairs or words learned from text, or any of the library `tokenizers`.

Byte pairs are those of GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners",
section 2.2): merges of the bytes of UTF-8 within words, so that any text can be encoded, and comes back
unchanged.
"""

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from unrolled.data._bpe import import_tokenizers, learned
from unrolled.data._reading import TokenTexts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
DEFAULT_SIZE = 8_000
UNKNOWN = "<unk>"
WORDS = r"\n|\w+(?:['’.-]\w+)*|[^\w\s]"
"""A word: a line break; letters and digits, with single signs inside as in "don't" and "3.5"; or a sign."""
BLANKS = r"\n|\S+"
"""A word: a line break; or what stands between spaces."""
LONGEST_PIECE = 2**17  # characters encoded at once: longer texts take more time and memory for each


class TextTokenizer:
    """Text to ids and back.

    A text becomes the ids of its tokens and nothing else: no special token is added, and characters that
    spell a special token are read as characters.

    Args:
        tokenizer: a `tokenizers.Tokenizer`. It is changed in place: it no longer adds special tokens.
        end: the id that ends a document; None if there is none.
    """

    def __init__(self, tokenizer: "Tokenizer", end: int | None) -> None:
        tokenizer.post_processor = None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer, self.end = tokenizer, end
        self._size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int) -> "TextTokenizer":
        """Learn merges of the most frequent pairs until there are `vocab_size` ids, or no pair occurs twice.

        Id 0 is the end of a document; the next 256 ids are the bytes. The same texts give the same merges,
        whatever the number of threads.

        Raises:
            ImportError: the library `tokenizers` is not installed.
        """
        return cls(learned(_library(), texts, vocab_size, end=END, add_prefix_space=False), 0)

    @classmethod
    def learn_words(
        cls, texts: Iterable[str], word: str = WORDS, vocab_size: int | None = None
    ) -> "TextTokenizer":
        """Make ids for the words that occur at least twice, or for the `vocab_size` - 1 most frequent words.

        Id 0 stands for any other word. `word` is the regular expression of a word, such as `WORDS` or
        `BLANKS`. Of words that are equally frequent, those that come first in the alphabet get ids. Spaces
        are not tokens: `decode` puts a space between every two words.

        Raises:
            ImportError: the library `tokenizers` is not installed.
        """
        library = _library()
        splitter = library.pre_tokenizers.Split(library.Regex(word), "removed", invert=True)
        counts = Counter(found for text in texts for found, _ in splitter.pre_tokenize_str(text))
        del counts[UNKNOWN]
        words = sorted(counts, key=lambda x: (-counts[x], x))
        words = [x for x in words if counts[x] > 1] if vocab_size is None else words[: vocab_size - 1]
        ids = {x: id for id, x in enumerate([UNKNOWN, *words])}
        tokenizer = library.Tokenizer(library.models.WordLevel(ids, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = splitter
        return cls(tokenizer, None)

    @classmethod
    def of_json(cls, text: str, end: int | None) -> "TextTokenizer":
        """Read a `tokenizer.json`.

        Raises:
            ImportError: the library `tokenizers` is not installed.
            ValueError: the text is not a tokenizer, or the tokenizer has no id `end`.
        """
        library = _library()
        try:
            found = cls(library.Tokenizer.from_str(text), end)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"it is not a tokenizer: {error}") from error
        if end is not None and end >= len(found):
            raise ValueError(f"end is {end}, but must be one of the {len(found)} ids of the tokenizer")
        return found

    def to_json(self) -> str:
        """Serialise to JSON, in the library's format."""
        text: str = self._tokenizer.to_str()
        return text

    def __len__(self) -> int:
        """One more than the highest id."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            ValueError: the text has surrogates, which a terminal makes of bytes that are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not Unicode at character {error.start}: it has surrogates"
            ) from error
        return [id for piece in pieces(text) for id in self.encode_piece(piece)]

    def encode_piece(self, piece: str) -> list[int]:
        """Return the ids of a piece of a text; other threads can run meanwhile."""
        (found,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text in the smallest integer type that holds them all."""
        parts = [np.array(self.encode_piece(piece), self.dtype) for piece in pieces(text)]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ids in files: uint16, or uint32 for more than 65,536 ids."""
        return np.dtype(np.uint16 if len(self) <= 2**16 else np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens have no text, and bytes that are not UTF-8 become U+FFFD."""
        if self.contents is not None:
            return b"".join(map(self.content, ids)).decode(errors="replace")
        text: str = self._tokenizer.decode(list(ids))
        return text

    def reader(self, before: Sequence[int] = ()) -> Callable[[int], str]:
        """Return a function that decodes one id at a time; a character appears once it is complete.

        With a tokenizer of words, each word comes with the space before it. Other tokenizers may leave out
        the space before the first token of a text, so give the ids `before`, if there are any.
        """
        if self.contents is not None:
            utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda token: utf8.decode(self.content(token))
        if self._decoder is None:
            return lambda token: f" {self.name(token) or ''}"
        read = self.texts.reader(before)
        return lambda token: read([token])

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def name(self, id: int) -> str | None:
        """Return the name of a token, such as "<|endoftext|>"."""
        found: str | None = self._tokenizer.id_to_token(id)
        return found

    def content(self, id: int) -> bytes:
        """Return the bytes of a token of byte pairs; none for a special token or an id beyond the last."""
        assert self.contents is not None
        return self.contents[id] if id < len(self.contents) else b""

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of single tokens."""
        return TokenTexts(self._tokenizer)

    @cached_property
    def _decoder(self) -> dict[str, Any] | None:
        """The decoder in the JSON of the tokenizer; None if it joins tokens by spaces."""
        found: dict[str, Any] | None = json.loads(self.to_json())["decoder"]
        return found

    @cached_property
    def contents(self) -> list[bytes] | None:
        """The bytes of each token; None if tokens are not simply sequences of bytes."""
        if self._decoder is None or self._decoder["type"] != "ByteLevel":
            return None
        letters = byte_letters()
        found = [b""] * len(self)
        added = self._tokenizer.get_added_tokens_decoder()
        for token, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if id in added:
                found[id] = b"" if added[id].special else token.encode()
            elif all(letter in letters for letter in token):
                found[id] = bytes(letters[letter] for letter in token)
            else:
                return None
        return found


def pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most `LONGEST_PIECE` characters, before the last white space of each.

    With the pattern of GPT-2, which tokenizers made here have, byte pairs never reach from a word into the
    white space after it, so the pieces have the same ids as the whole text. Other patterns may join a full
    stop to the line break after it; a cut between the two changes the ids there. A piece without white space
    is cut at its full length.
    """
    start = 0
    while len(text) - start > LONGEST_PIECE:
        border = end_of_piece(text, start)
        yield text[start:border]
        start = border
    if start < len(text):
        yield text[start:]


def end_of_piece(text: str, start: int = 0) -> int:
    """Return the end of the piece from `start` on; more than `LONGEST_PIECE` characters must follow."""
    for border in range(start + LONGEST_PIECE, start, -1):
        if text[border] in " \n" and not text[border - 1].isspace():
            return border
    return start + LONGEST_PIECE


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level tokenizers; a printable byte is its own letter."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _library() -> Any:
    return import_tokenizers("this needs", "tokenize")
