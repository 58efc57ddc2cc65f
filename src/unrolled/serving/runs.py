"""The jobs of one request: submitted together, with one stream of events, and cancelled together."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unrolled.decode.request import Sampling, random_keys
from unrolled.serving.jobs import Drawn, EngineError, Event, Finished, Job, Prompted, Run, Watch
from unrolled.serving.logs import Record
from unrolled.serving.model import Served
from unrolled.serving.protocol.errors import ApiError, invalid, of_engine
from unrolled.serving.service import Service
from unrolled.serving.snapshot import MOST, Snapshot


@dataclass(frozen=True)
class Asked:
    """The options of a request, which hold for each of its prompts.

    Attributes:
        state: the state that all prompts follow.
        sampling: how tokens are drawn.
        seed: seed of the random streams; None for a seed from the system.
        n: number of continuations of each prompt.
        stops: token sequences that end a continuation.
        watch: returns the `Job.watch` that looks for stop texts, given the ids before the continuations of a
            prompt, those of them that are held, and the number of continuations; None if there are no stop
            texts.
        logprobs: number of most likely tokens to report with each token; None reports no log probabilities.
        prompt_logprobs: whether to report log probabilities of the prompt's tokens too.
        keep: whether to keep the state at the end of each continuation.
    """

    state: Snapshot | None
    sampling: Sampling
    seed: int | None
    n: int
    stops: list[list[int]]
    watch: Callable[[Sequence[int], Sequence[int], int], Watch] | None
    logprobs: int | None
    prompt_logprobs: bool
    keep: bool


class Runs:
    """The jobs of a request, one for each prompt.

    Continuation i of prompt p has the number p * n + i.

    Args:
        service: stores states, and has the metrics.
        served: the model.
        prompts: for each prompt, the tokens to read after the state.
        limits: for each prompt, the maximum number of new tokens of a continuation.
        asked: the options of the request.
        record: the record of the request, where tokens are counted.

    Attributes:
        count: number of continuations.
        before: for each prompt, the ids before its continuations; of those of the state only the last.
        held: for each prompt, the ids that the state holds, if its continuations follow the state directly.

    Raises:
        ApiError: the engine refuses a job; the other jobs are then cancelled.
    """

    def __init__(
        self,
        service: Service,
        served: Served,
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        asked: Asked,
        record: Record,
    ) -> None:
        self.asked, self.count = asked, len(prompts) * asked.n
        length, last = (0, []) if asked.state is None else (asked.state.length, [asked.state.pending])
        self.before = [last + tokens for tokens in prompts]
        self.held = [() if asked.state is None or tokens else asked.state.held for tokens in prompts]
        self._lengths = [length + len(tokens) for tokens in prompts]
        self._read = sum(self._lengths)
        self._service, self._record, self._runs = service, record, list[Run]()
        record.read = self._read
        seed = None if asked.seed is None else asked.seed % 2**63
        keys = random_keys(seed, len(prompts), asked.n).tolist()
        for number, (tokens, limit) in enumerate(zip(prompts, limits, strict=True)):
            job = Job(
                tokens=tokens,
                state=asked.state,
                limit=limit,
                sampling=asked.sampling,
                keys=keys[number * asked.n : (number + 1) * asked.n],
                stops=asked.stops,
                watch=asked.watch and asked.watch(self.before[number], self.held[number], asked.n),
                logprobs=asked.logprobs,
                prompt_logprobs=asked.prompt_logprobs,
                keep=asked.keep,
                client=record.client,
                owner=record.client if service.settings.keys else "",  # so that no client can guess prompts
                together=len(prompts),
                deadline=record.began + service.settings.timeout,
            )
            try:
                self._runs.append(served.engine.submit(job))
            except Exception as error:
                self.cancel()
                raise of_engine(error) from error

    def cancel(self) -> None:
        """Free the rows at once."""
        for run in self._runs:
            run.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield events, each with the number of its prompt; when the iteration ends, the rows are free.

        Raises:
            ApiError: a job failed, timed out or was given up.
        """
        last = None
        try:
            async for number, event in _merged(self._runs):
                if isinstance(event, Drawn) and event.tokens:
                    last = self._count(event, last)
                elif isinstance(event, Prompted):
                    self._count_read(number, event.cached)
                yield number, event
        except ApiError:
            raise
        except Exception as error:
            if type(error) is EngineError and _damaged(self.asked.state):
                raise invalid("the state holds NaN or infinity", "state", "damaged_state") from error
            raise of_engine(error) from error
        finally:
            self.cancel()

    async def kept(self, event: Finished, held: Sequence[Sequence[int]] | None = None) -> list[str | None]:
        """Store the state of each continuation of a prompt, and return their ids; None where none is kept.

        Args:
            event: has the states.
            held: for each continuation, its last ids if the text of them is not complete.
        """
        if event.snapshots is None:
            return [None] * self.asked.n
        holding = [()] * self.asked.n if held is None else held
        return [
            await self._service.keep(replace(snapshot, held=tuple(ids)))
            for snapshot, ids in zip(event.snapshots, holding, strict=True)
        ]

    def usage(self) -> dict[str, Any]:
        """Return how many tokens were read and drawn so far."""
        return {
            "prompt_tokens": self._read,
            "completion_tokens": self._record.drawn,
            "total_tokens": self._read + self._record.drawn,
            "prompt_tokens_details": {"cached_tokens": self._record.cached},
        }

    def _count_read(self, number: int, cached: int) -> None:
        self._record.cached += cached
        self._service.metrics.cached.inc(cached)
        self._service.metrics.read.inc(self._lengths[number] - cached)

    def _count(self, event: Drawn, last: float | None) -> float:
        now, metrics = time.monotonic(), self._service.metrics
        if last is None:
            metrics.first_token.observe(now - self._record.began)
        else:
            metrics.block.observe(now - last)
        metrics.drawn.inc(len(event.tokens))
        self._record.drawn += len(event.tokens)
        return now


def room(served: Served, length: int, asked: int | None, default: int, param: str) -> int:
    """Return the number of new tokens that a sequence may get.

    Args:
        served: the model.
        length: number of tokens of the state and the prompt.
        asked: the number that the request asks for; None if it does not say.
        default: the number if the request does not say.
        param: name of the field that holds the prompt, for the message.

    Raises:
        ApiError: the sequence would get longer than the model allows.
    """
    most = MOST if served.n_positions is None else served.n_positions
    left = most - length + 1  # the last token is drawn, but not read
    if left < 1 or (asked or 0) > left:
        wanted = "" if asked == 0 else f" and {asked or 1} more are wanted"
        raise invalid(
            f"{param} and state have {length} tokens{wanted}, but the model reads {most} at most",
            param if left < 1 else "max_tokens",
            "context_length_exceeded",
        )
    return min(default, left) if asked is None else asked


def _damaged(state: Snapshot | None) -> bool:
    """Whether NaN or infinity in a state, which may come from a client, can be why the engine failed."""
    return state is not None and not all(bool(x.isfinite().all()) for x in state.tensors.values())


async def _merged(runs: Sequence[Run]) -> AsyncIterator[tuple[int, Event]]:
    if len(runs) == 1:
        async for event in runs[0]:
            yield 0, event
        return
    queue = asyncio.Queue[tuple[int, Event] | Exception | None](1)  # the others wait in their runs

    async def pass_on(number: int, run: Run) -> None:
        try:
            async for event in run:
                await queue.put((number, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pass_on(number, run)) for number, run in enumerate(runs)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
