"""The text and the log probabilities that a client gets, made from the blocks of a continuation."""

from collections.abc import Sequence
from typing import Any

from unrolled.serving.jobs import Drawn, TokenLogprob
from unrolled.serving.stops import StopFinder
from unrolled.serving.text import BROKEN, Text


class Choice:
    """The text of one continuation, cut before a stop text or a token that ends it.

    Args:
        text: decodes the ids.
        before: ids before the continuation.
        held: those at the end of `before` whose text is not complete.
        stops: texts that end the continuation.
        ends: token sequences that end the continuation.
        keep: whether the state at the end is kept, so that the next answer can complete a character.
    """

    def __init__(
        self,
        text: Text,
        before: Sequence[int],
        held: Sequence[int],
        stops: Sequence[str],
        ends: Sequence[list[int]],
        keep: bool,
    ) -> None:
        self._read, self._finder = text.reader(before, held), StopFinder(stops)
        self._ends, self._keep = ends, keep
        self._begun: list[int] = []  # the last tokens, if they may be the beginning of an end

    @property
    def held(self) -> list[int]:
        """The last ids, if the text of them is not complete."""
        return self._read.held

    def take(self, drawn: Drawn) -> str:
        """Return the text that is certain after the next block."""
        tokens, final = [*self._begun, *drawn.tokens], drawn.finish is not None
        hidden = 0  # number of the last tokens that do not belong to the text, or not yet
        if drawn.finish == "stop":
            hidden = max((len(x) for x in self._ends if tokens[-len(x) :] == x), default=0)
        elif not final:
            begun = (n for x in self._ends for n in range(1, len(x)) if tokens[-n:] == x[:n])
            hidden = max(begun, default=0)
        tokens, self._begun = tokens[: len(tokens) - hidden], tokens[len(tokens) - hidden :]
        goes_on = self._keep and drawn.finish == "length"
        told = self._finder.feed(self._read(tokens, final and not goes_on))
        return told + self._finder.rest() if final and not self._finder.found else told


class CompletionLogprobs:
    """Log probabilities in the form of /v1/completions: lists with an entry for each token.

    Args:
        text: decodes the ids.
        before: ids before the first token.
        held: those at the end of `before` whose text is not complete.
        offset: number of characters before the first token.
    """

    def __init__(self, text: Text, before: Sequence[int], held: Sequence[int], offset: int) -> None:
        self._text, self._read, self._offset = text, text.reader(before, held), offset
        self._held = bool(self._read.held)  # whether the last token may begin a character

    def of(self, tokens: Sequence[int], found: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return the lists for the next tokens; None in `found` is a token with unknown probabilities."""
        offsets = []
        for token in tokens:
            read = self._read([token])
            broken = len(read) - len(read.lstrip(BROKEN)) if self._held else 0  # of tokens before this one
            self._held = bool(self._read.held)
            own = not self._held and bool(read)  # whether the last character is of this token
            offsets.append(self._offset + min(broken, len(read) - own))
            self._offset += len(read)
        piece = self._text.piece
        return {
            "tokens": [piece(token) for token in tokens],
            "token_logprobs": [None if x is None else x.logprob for x in found],
            "top_logprobs": [None if x is None else self._top(x) for x in found],
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens, and also the token of the text if it is not one of them."""
        named: dict[str, float] = {}
        for id, logprob in [*found.top, (found.token, found.logprob)]:
            named.setdefault(self._text.piece(id), logprob)  # of tokens with equal texts, the most likely one
        return named


def chat_logprobs(text: Text, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log probabilities in the form of /v1/chat/completions."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text.piece(token), "logprob": logprob, "bytes": text.piece_bytes(token)}

    content = [
        described(x.token, x.logprob) | {"top_logprobs": [described(i, p) for i, p in x.top]} for x in found
    ]
    return {"content": content, "refusal": None}
