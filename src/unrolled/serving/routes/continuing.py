"""Code that completions and chat share, from a request and its prompts to running jobs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from unrolled.serving.choices import Choice
from unrolled.serving.jobs import Drawn, Finished, Prompted, TokenLogprob
from unrolled.serving.logs import record_of
from unrolled.serving.model import Served
from unrolled.serving.protocol.errors import invalid
from unrolled.serving.protocol.fields import MOST_ROWS, TextContinuation
from unrolled.serving.runs import Asked, Runs, room
from unrolled.serving.service import service_of
from unrolled.serving.snapshot import Snapshot
from unrolled.serving.stops import Watch
from unrolled.serving.text import Text

LONG = 10_000  # characters or tokens
T = TypeVar("T")


async def state_of(request: Request, body: TextContinuation, served: Served) -> Snapshot | None:
    """Return the state that a request continues, if there is one.

    Raises:
        ApiError: the state is unknown, damaged, or of another model.
    """
    return None if body.state is None else await service_of(request).snapshot(body.state, served)


async def aside(size: int, call: Callable[[], T]) -> T:
    """Call in a thread if `size`, in characters or tokens, is large, so that other requests do not wait."""
    return await asyncio.to_thread(call) if size > LONG else call()


async def encode(
    text: Text, given: str, param: str, state: Snapshot | None = None, *, special: bool = False, size: int = 0
) -> list[int]:
    """Return the ids of a text that is read from the start, or after a state; see `Text.encode`.

    If the state ends in a token that ends texts, such as that of a turn in a chat, and the text begins with
    this token, it is not read again. `size` is the number of characters of all texts of the request.

    Raises:
        ApiError: the text has a character outside the vocabulary.
    """
    ended = state is not None and [state.pending] in text.ends
    encoded = partial(text.encode, given, special=special, within=state is not None and not ended)
    try:
        ids = await aside(max(size, len(given)), encoded)
    except ValueError as error:
        raise invalid(f"{param}: {error}", param) from None
    if state is not None and ended and special and state.pending in ids:
        place = ids.index(state.pending)
        return ids if text.decode(ids[:place]).strip() else ids[place + 1 :]
    return ids


def check_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Return `ids` if all of them are in the vocabulary.

    Raises:
        ApiError: an id is not in the vocabulary.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(x for x in ids if not 0 <= x < vocab_size)
        shown = f"the id {wrong}" if abs(wrong) < 10**20 else "too large a number"
        raise invalid(f"{param} holds {shown}, but must hold ids of 0 to {vocab_size - 1}", param)
    return ids


def stops_of(text: Text, body: TextContinuation, vocab_size: int) -> tuple[list[list[int]], list[str]]:
    """Return what ends a continuation: sequences of ids, and texts.

    Raises:
        ApiError: the vocabulary holds plain numbers, and a stop text holds something else or other numbers.
    """
    ids = [] if body.ignore_eos else text.ends
    if not text.of_numbers:
        return ids, body.stops
    numbers = []
    for stop in body.stops:  # "7" must not end a continuation at 74
        try:
            numbers.append(check_ids(text.encode(stop), vocab_size, "stop"))
        except ValueError as error:
            raise invalid(f"stop: {error}", "stop") from None
        if not numbers[-1]:
            raise invalid(f"stop is {stop!r}, but must hold numbers", "stop")
    return [*ids, *numbers], []


@dataclass
class Piece:
    """The new output of one continuation.

    Attributes:
        index: number of the continuation.
        text: text that is now certain.
        tokens: the new tokens.
        logprobs: log probabilities of each token; None if they were not asked for.
        finish: why the continuation ended; None if it has not ended.
        state: id of the state at the end, if it is kept.
        prompted: the event that the prompt was read, in the first piece of a continuation; else None.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    state: str | None = None
    prompted: Prompted | None = None


class Continuing:
    """The running jobs of a request for text.

    Attributes:
        text: decodes the ids.
        runs: the jobs.
    """

    def __init__(self, text: Text, runs: Runs, stops: list[str], *, tells_usage: bool) -> None:
        self.text, self.runs, self._tells_usage = text, runs, tells_usage
        self._choices = [
            Choice(text, before, held, stops, runs.asked.stops, runs.asked.keep)
            for before, held in zip(runs.before, runs.held, strict=True)
            for _ in range(runs.asked.n)
        ]

    @classmethod
    def start(
        cls,
        request: Request,
        served: Served,
        text: Text,
        body: TextContinuation,
        state: Snapshot | None,
        prompts: list[list[int]],
        *,
        param: str,
        default: int,
        logprobs: int | None,
        prompt_logprobs: bool = False,
    ) -> "Continuing":
        """Submit the jobs.

        Args:
            request: the HTTP request.
            served: the model.
            text: encodes and decodes its ids.
            body: the body of the request.
            state: the state that the prompts follow.
            prompts: the ids of each prompt, without a start symbol. Those that do not belong to the
                vocabulary are refused: the tokenizer of a chat may have special tokens that the model lacks.
            param: name of the field that holds the prompts.
            default: maximum number of new tokens if the request does not say.
            logprobs: number of most likely tokens to report with each token; None reports nothing.
            prompt_logprobs: whether to report log probabilities of the prompts too.

        Raises:
            ApiError: the request does not fit the model, or the engine refuses it.
        """
        for ids in prompts:
            check_ids(ids, served.vocab_size, param)
        service, n = service_of(request), body.n or 1
        if len(prompts) * n > MOST_ROWS:
            raise invalid(
                f"n asks for {len(prompts) * n} continuations, but at most {MOST_ROWS} are made", "n"
            )
        if state is None:
            start = [served.vocab_size] if served.start_token else []
            prompts = [start + ids for ids in prompts]
            if not all(prompts):
                raise invalid(
                    f"{param} is empty, but the model has no start symbol and there is no state", param
                )
        known = 0 if state is None else state.length
        limits = [room(served, known + len(ids), body.limit, default, param) for ids in prompts]
        ends, stops = stops_of(text, body, served.vocab_size)
        asked = Asked(
            state=state,
            sampling=body.sampling(),
            seed=body.seed,
            n=n,
            stops=ends,
            watch=partial(Watch, text, stops) if stops else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            keep=bool(body.keep),
        )
        runs = Runs(service, served, prompts, limits, asked, record_of(request))
        return cls(text, runs, stops, tells_usage=body.continuous_usage)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the new output of each continuation, block by block; its last piece has a finish reason.

        If states are kept, the last piece comes once they are stored.

        Raises:
            ApiError: as `Runs.events`.
        """
        n, keeps, last = self.runs.asked.n, self.runs.asked.keep, dict[int, Piece]()
        async for number, event in self.runs.events():
            if isinstance(event, Prompted):
                for i in range(n):
                    yield Piece(number * n + i, prompted=event)
            elif isinstance(event, Drawn):
                index = number * n + event.index
                text = self._choices[index].take(event)
                piece = Piece(index, text, event.tokens, event.logprobs, event.finish)
                if event.finish is not None:
                    last[index] = piece
                if event.finish is None or not keeps:
                    yield piece
            elif isinstance(event, Finished):
                held = [choice.held for choice in self._choices[number * n : (number + 1) * n]]
                for i, state in enumerate(await self.runs.kept(event, held)):
                    index = number * n + i
                    piece = last.get(index) or Piece(index, finish="length")  # the limit was 0
                    piece.state = state
                    if keeps or index not in last:
                        yield piece

    @property
    def usage_so_far(self) -> dict[str, Any]:
        """The usage as a field of a chunk, if the client wants it in every chunk."""
        return {"usage": self.runs.usage()} if self._tells_usage else {}

    @property
    def alone(self) -> bool:
        """Whether there is only one continuation, whose state is then at the top level of the response."""
        return self.runs.count == 1
