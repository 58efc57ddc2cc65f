"""Byte-pair encoding, with merges learned from text by the library `tokenizers`.

Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units", arXiv 1508.07909, section
3.2. The merges are over the bytes of UTF-8, so any text can be encoded.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unrolled.data._codec import listed
from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "</s>"
END_ID = 0
SMALLEST = 257  # the end symbol and the bytes


class BytePairs:
    """Text to ids and back. Id 0 is the symbol that ends every text.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; see `learn` and `of_json`.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int) -> "BytePairs":
        """Learn merges of the most frequent pairs until there are `vocab_size` ids, or no pair occurs twice.

        Raises:
            ImportError: the library `tokenizers` is not installed.
        """
        tokenizer = learned(_library(), texts, vocab_size, end=END, add_prefix_space=True)
        tokenizer.encode_special_tokens = True  # in a text, "</s>" is four characters
        return cls(tokenizer)

    @classmethod
    def of_json(cls, text: str) -> "BytePairs":
        """Read what `to_json` wrote.

        Raises:
            ImportError: the library `tokenizers` is not installed.
            ValueError: the text is not a tokenizer.
        """
        library = _library()
        try:
            tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"it is not a tokenizer: {error}") from error
        tokenizer.encode_special_tokens = True
        return cls(tokenizer)

    def to_json(self) -> str:
        """Serialise to JSON, in the library's format."""
        text: str = self._tokenizer.to_str()
        return text

    def __len__(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text and the end symbol, int64 [T]."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Tensor]:
        """Encode many texts, faster than one by one.

        Raises:
            ValueError: a text has surrogates, which a terminal makes of bytes that are not UTF-8.
        """
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{text!r} is not text: it has bytes that are not UTF-8") from error
        # The pre-tokenizer puts a space before a text unless it begins with one, and `decode` takes one away.
        whole = [f" {text}" if text.startswith(" ") else text for text in texts]
        return [torch.tensor([*found.ids, END_ID]) for found in self._tokenizer.encode_batch(whole)]

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [T] up to the first end symbol; bytes that are not UTF-8 become U+FFFD."""
        values = listed(ids)
        if END_ID in values:
            values = values[: values.index(END_ID)]
        text: str = self._tokenizer.decode(values)
        return text.removeprefix(" ")  # added before the first word


def _library() -> Any:
    return import_tokenizers("byte pairs need", "translate")


def import_tokenizers(user: str, extra: str) -> Any:
    """Import the library `tokenizers`, for a `user` such as "this needs".

    Raises:
        ImportError: the library is not installed.
    """
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(
            f"{user} the library tokenizers, which is missing: {how_to_install(extra)}"
        ) from error
    return tokenizers


def learned(
    library: Any, texts: Iterable[str], vocab_size: int, *, end: str, add_prefix_space: bool
) -> "Tokenizer":
    """Learn merges until there are `vocab_size` ids, or no pair occurs twice; id 0 is the token `end`."""
    tokenizer: Tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[end],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
