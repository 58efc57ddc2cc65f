"""What is asked of the engine, and what it answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from unrolled.decode.request import Sampling
from unrolled.serving.snapshot import Snapshot

Watch = Callable[[int, list[int]], int | None]


class EngineError(RuntimeError):
    """A job failed; the message says why."""


class BusyError(EngineError):
    """The queue is full."""


class TooLargeError(EngineError):
    """The states of a job would never fit in the memory of the engine, or its continuations in the rows."""


class TimedOutError(EngineError):
    """The deadline of a job has passed."""


class StoppingError(EngineError):
    """The engine is shutting down."""


@dataclass(frozen=True)
class Job:
    """Tokens to read, and how to go on.

    Attributes:
        tokens: to be read; without a state at least one, the start symbol included if the model has one.
        state: of the sequence that they continue.
        limit: most new tokens; with 0 the tokens are read, and nothing is drawn.
        sampling: how tokens are drawn.
        keys: the random stream of each continuation: there are as many as keys.
        stops: token sequences that end a continuation.
        watch: called in the thread of the engine as `watch(index, new_tokens)` for each continuation that
            goes on; returns how many of these tokens to keep, at least 1, if it ends among them, else None.
        logprobs: tell the logarithm of the probability of each new token, and of as many of the most likely
            ones; None for nothing.
        prompt_logprobs: tell them for `tokens`, too.
        keep: make a snapshot at the end of each continuation.
        client: whose job it is; clients take turns.
        deadline: when it is given up, in seconds of `time.monotonic`.
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
    deadline: float = float("inf")


@dataclass(frozen=True)
class TokenLogprob:
    """A token, the logarithm of its probability, and the most likely tokens with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Prompted:
    """The tokens of a job were read.

    Attributes:
        cached: how many tokens of the state and of the prompt were not read again.
        logprobs: of each token of the job, if asked for; None for the first token of a sequence.
    """

    cached: int
    logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True)
class Drawn:
    """New tokens of a continuation.

    Attributes:
        index: its number.
        tokens: with those of a stop sequence.
        logprobs: of each, if asked for.
        finish: why it ended: "stop", or "length" at the limit; None if it goes on.
    """

    index: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Finished:
    """The job is done. With `keep`, `snapshots` has one for each continuation, at the end of it."""

    snapshots: list[Snapshot] | None = None


Event = Prompted | Drawn | Finished


class Run:
    """A job in the engine. Iterate over it for its events: `Prompted`, any number of `Drawn`, `Finished`.

    Raises:
        EngineError: in the iteration, if the job fails.
    """

    def __init__(self, job: Job, wake: Callable[[], None]) -> None:
        self.job = job
        self.cancelled = False
        self.loop = asyncio.get_running_loop()
        self._wake = wake
        self._events: asyncio.Queue[Event | EngineError] = asyncio.Queue()

    def cancel(self) -> None:
        """Give the job up: its rows are freed."""
        self.cancelled = True
        self._wake()

    def deliver(self, event: Event | EngineError) -> None:
        """Add an event, in the thread of the event loop."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if isinstance(event, EngineError):
                raise event
            yield event
            if isinstance(event, Finished):
                return
