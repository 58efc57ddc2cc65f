"""Texts that end a continuation."""

from collections.abc import Sequence

from unrolled.serving.text import Text


class StopFinder:
    """Looks for stop texts in a text that comes in parts.

    Args:
        stops: texts, none of them empty. The stop text that ends first counts; of several that end at the
            same place, the longest.

    Attributes:
        found: whether a stop text was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def feed(self, text: str) -> str:
        """Take the next part; return the text that is certainly not part of a stop text.

        Text that could be the beginning of a stop text is held back. Once a stop text was found, nothing more
        is returned.
        """
        if self.found:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        places = [(place + len(x), place) for x in self._stops if (place := held.find(x)) >= 0]
        if places:
            self.found, self._held = True, ""
            return held[: min(places)[1]]
        kept = max(_beginning(held, stop) for stop in self._stops)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def rest(self) -> str:
        """Return the text that was held back; called at the end of the text."""
        held, self._held = self._held, ""
        return held


class Watch:
    """Tells the engine where a stop text ends a continuation; see `Job.watch`.

    The engine calls it in its own thread, with the new tokens of one continuation at a time.

    Args:
        text: decodes the ids.
        stops: texts, none of them empty.
        before: ids before the continuations.
        held: those at the end of `before` whose text is not complete.
        count: number of continuations.
    """

    def __init__(
        self, text: Text, stops: Sequence[str], before: Sequence[int], held: Sequence[int], count: int
    ) -> None:
        self._reading = [(text.reader(before, held), StopFinder(stops)) for _ in range(count)]

    def __call__(self, index: int, tokens: list[int]) -> int | None:
        """Return how many of these tokens to keep if the continuation ends among them, else None."""
        read, finder = self._reading[index]
        for number, token in enumerate(tokens, 1):
            finder.feed(read([token]))
            if finder.found:
                return number
        return None


def _beginning(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
