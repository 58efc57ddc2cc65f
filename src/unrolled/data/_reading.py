"""The text of single tokens and of ids that arrive one by one, for any tokenizer of the library `tokenizers`.

The decoders of the library are made for whole texts: some strip the space before the first token, and none
can tell a part of a character from a broken one. So ids are decoded after an earlier token, whose text is
then cut off; and text that ends in U+FFFD waits for the next ids.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"
LONGEST = 4  # ids of a character, which has at most 4 bytes


class TokenTexts:
    """The texts of the tokens of a tokenizer. Special tokens and ids beyond the tokenizer have none.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, which must not be changed afterwards.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {id for id, token in added.items() if token.special}
        ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
        self.any = next((id for id in ids if self.stands(id)), None)

    def reader(self, before: Sequence[int] = (), held: Sequence[int] = ()) -> "TextReader":
        """Return a decoder of the ids that follow the ids `before`; without any, they begin a text."""
        return TextReader(self, before, held)

    def within(self, id: int) -> str:
        """Return the text of one token within a text."""
        return self.after(self.any, [id])

    def visible(self, id: int) -> bool:
        """Whether an id has a text, or a part of one."""
        return id not in self.special and self._tokenizer.id_to_token(id) is not None

    def stands(self, id: int) -> bool:
        """Whether a token has a text whatever the next tokens are."""
        name = self._tokenizer.id_to_token(id)
        if id in self.special or name is None or name.startswith("<0x"):  # a byte, joined to other bytes
            return False
        text = self.after(None, [id])
        return bool(text) and BROKEN not in text

    def after(self, before: int | None, ids: list[int]) -> str:
        """Return the text of ids after a token that stands; at the beginning of a text if it is None."""
        if before is not None:
            known, text = (self._tokenizer.decode(x) for x in ([before], [before, *ids]))
            if text.startswith(known):
                return text[len(known) :]
        return self._tokenizer.decode(ids)


class TextReader:
    """Decodes one sequence while its ids arrive, in a time that is proportional to their number.

    Args:
        texts: the texts of the tokens.
        before: ids before the sequence.
        held: the attribute `held` of the decoder of the ids `before`, at their end.

    Attributes:
        held: the last ids, if the text of them is not complete.
    """

    def __init__(self, texts: TokenTexts, before: Sequence[int], held: Sequence[int] = ()) -> None:
        self._texts, self.held = texts, list[int]()
        self._before: int | None = None  # a token that stands, once a text has begun
        if (last := next(filter(texts.visible, reversed(before)), None)) is not None:
            self._pass(last)
        self(held)

    def __call__(self, ids: Sequence[int], final: bool = False) -> str:
        """Return the text that is complete with these ids.

        Args:
            ids: the next ids.
            final: whether these are the last ids, so that incomplete bytes become U+FFFD.
        """
        told = [self._add(id) for id in ids if self._texts.visible(id)]
        if final and self.held:
            told.append(self._text(self.held))
            self.held.clear()
        return "".join(told)

    def _add(self, id: int) -> str:
        held = self.held
        held.append(id)
        for start in range(len(held)):  # some decoders take bytes for broken because of bytes before them
            if not (text := self._text(held[start:])).endswith(BROKEN):
                text = (self._text(held[:start]) if start else "") + text
                held.clear()
                self._pass(id)
                return text
        if len(held) <= LONGEST:
            return ""
        text = self._text(held[:1])
        size = max(n for n in range(1, len(held)) if self._text(held[:n]) == text)  # a U+FFFD has three bytes
        self._pass(held[size - 1])
        del held[:size]
        return text

    def _text(self, ids: list[int]) -> str:
        return self._texts.after(self._before, ids)

    def _pass(self, id: int) -> None:
        """Let an id be the last that was decoded."""
        if self._texts.stands(id):
            self._before = id
        elif self._before is None:
            self._before = self._texts.any
