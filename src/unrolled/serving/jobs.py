"""The jobs of the engine, and the events with their results."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from unrolled.decode.request import Sampling
from unrolled.serving.snapshot import Snapshot

MOST_EVENTS = 256
"""Maximum number of events of a job that wait for its client: seconds of drawing, and some MB at most."""

Watch = Callable[[int, list[int]], int | None]


class EngineError(RuntimeError):
    """A job failed; the message says why."""


class BusyError(EngineError):
    """The queue is full."""


class TooLargeError(EngineError):
    """A request would never fit: it needs too much memory, or has too many continuations or prompts."""


class TimedOutError(EngineError):
    """The deadline of a job has passed."""


class StoppingError(EngineError):
    """The engine is shutting down."""


@dataclass(frozen=True)
class Job:
    """Tokens to read, and how to continue them.

    Attributes:
        tokens: tokens to read, including the start symbol if the model has one; without a state, at least
            one.
        state: state of the sequence that the tokens continue.
        limit: maximum number of new tokens; with 0, the tokens are read, and nothing is drawn.
        sampling: how tokens are drawn.
        keys: the random stream of each continuation. There is one continuation for each key.
        stops: token sequences that end a continuation.
        watch: called in the thread of the engine as `watch(index, new_tokens)` for each continuation that has
            not ended. If the continuation ends among these tokens, `watch` returns how many of them to keep,
            at least 1; else None.
        logprobs: number of most likely tokens to report for each new token. Their log probabilities, and that
            of the new token, are reported too; None reports nothing.
        prompt_logprobs: whether to report the same for `tokens`.
        keep: whether to make a snapshot at the end of each continuation.
        client: the client of the job; clients take turns.
        owner: prompts share prefixes only with prompts of the same owner.
        together: number of jobs of the same request.
        deadline: when the job is given up, in seconds of `time.monotonic`.
    """

    tokens: list[int]
    limit: int
    state: Snapshot | None = None
    sampling: Sampling = field(default_factory=Sampling)
    keys: list[int] = field(default_factory=lambda: [0])
    stops: list[list[int]] = field(default_factory=list)
    watch: Watch | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    keep: bool = False
    client: str = ""
    owner: str = ""
    together: int = 1
    deadline: float = float("inf")


@dataclass(frozen=True)
class TokenLogprob:
    """A token, the logarithm of its probability, and the most likely tokens with their logarithms."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Prompted:
    """The tokens of a job were read.

    Attributes:
        cached: number of tokens of the state and of the prompt that were not read again.
        logprobs: log probabilities of each token of the job, if the job asks for them; the entry of the first
            token of a sequence is None.
    """

    cached: int
    logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True)
class Drawn:
    """New tokens of a continuation.

    Attributes:
        index: number of the continuation.
        tokens: the new tokens, including those of a stop sequence.
        logprobs: log probabilities of each token, if the job asks for them.
        finish: why the continuation ended: "stop", or "length" at the limit; None if it has not ended.
    """

    index: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Finished:
    """The job is done. With `keep`, `snapshots` has the state at the end of each continuation."""

    snapshots: list[Snapshot] | None = None


Event = Prompted | Drawn | Finished


class Run:
    """A job in the engine. Iterate over it for its events: `Prompted`, any number of `Drawn`, `Finished`.

    Attributes:
        told: number of events so far, of which some may not have been delivered yet.

    Raises:
        EngineError: in the iteration, if the job fails or is given up.
    """

    def __init__(self, job: Job, wake: Callable[[], None]) -> None:
        self.job = job
        self.cancelled = False
        self.loop = asyncio.get_running_loop()
        self._wake = wake
        self.told = self._taken = 0
        self._events: asyncio.Queue[Event | EngineError] = asyncio.Queue()

    def cancel(self) -> None:
        """Give up the job, which frees its rows, and end the iteration; any thread may call it."""
        self.cancelled = True
        with suppress(RuntimeError):  # the loop was closed: nobody listens
            self.loop.call_soon_threadsafe(self.deliver, EngineError("the job was given up"))
        self._wake()

    @property
    def behind(self) -> bool:
        """Whether the client takes the events so slowly that no more should be made for now."""
        return self.told - self._taken > MOST_EVENTS

    def deliver(self, event: Event | EngineError) -> None:
        """Add an event; called in the thread of the event loop."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self.cancelled:
            event = await self._events.get()
            self._taken += 1
            await asyncio.sleep(0)  # `get` does not let others run while there are events
            if isinstance(event, EngineError):
                raise event
            yield event
            if isinstance(event, Finished):
                return
        raise EngineError("the job was given up")
