"""An engine and a memory of states that behave as the interface says, without a model."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import torch

from unrolled.data import Vocabulary
from unrolled.generation.sampling import uniform
from unrolled.serving.jobs import (
    BusyError,
    Drawn,
    Event,
    Finished,
    Job,
    Prompted,
    StoppingError,
    TimedOutError,
    TokenLogprob,
)
from unrolled.serving.model import Served
from unrolled.serving.snapshot import Snapshot
from unrolled.serving.states import UnknownState
from unrolled.serving.text import VocabularyText

DIGEST = "ab" * 32
BYTES = 256


class FakeStates:
    """States in a dict."""

    def __init__(self) -> None:
        self.kept: dict[str, Snapshot] = {}
        self.damaged: set[str] = set()
        self.sessions: dict[str, str] = {}

    @property
    def memory(self) -> int:
        return sum(x.nbytes for x in self.kept.values())

    def keep(self, snapshot: Snapshot) -> str:
        self.kept[snapshot.id] = snapshot
        return snapshot.id

    def get(self, id: str) -> Snapshot:
        if id in self.damaged:
            raise ValueError("its bytes differ from its id")
        if id not in self.kept:
            raise UnknownState(id)
        return self.kept[id]

    def __contains__(self, id: str) -> bool:
        return id in self.kept

    def delete(self, id: str) -> bool:
        return self.kept.pop(id, None) is not None

    def session(self, name: str) -> str | None:
        return self.sessions.get(name)

    def move(self, name: str, expected: str | None, new: str | None) -> bool:
        if new is not None and new not in self.kept:
            raise UnknownState(new)
        if self.sessions.get(name) != expected:
            return False
        self.sessions.pop(name, None)
        if new is not None:
            self.sessions[name] = new
        return True


def follows(last: int, length: int, vocab_size: int) -> int:
    """The most likely token after `length` tokens of which this is the last."""
    return (last * 7 + length * 3 + 1) % vocab_size


class FakeRunner:
    """States are one number: the length."""

    def state(self, tensors: dict[str, torch.Tensor], tokens: int) -> None:
        if tensors.keys() != {"s"}:
            raise ValueError(f"the state has the tensors {sorted(tensors)}, but must have ['s']")


class FakeEngine:
    """Continues by `follows`, or at a temperature above 0 by the random stream of the key.

    Args:
        vocab_size: number of ids.
        script: if given, the tokens that every continuation has, over and over.
        block: tokens in a block.
        pause: seconds before each block.
        most: jobs at a time; more are refused.
        fails: raised before the second block.
    """

    def __init__(
        self,
        vocab_size: int = BYTES,
        *,
        script: list[int] | None = None,
        block: int = 4,
        pause: float = 0.0,
        most: int = 100,
        fails: Exception | None = None,
    ) -> None:
        self.vocab_size, self.script, self.block, self.pause = vocab_size, script, block, pause
        self.most, self.fails, self.stopping, self.alive = most, fails, False, True
        self.jobs: list[Job] = []
        self.runner = FakeRunner()
        self.waiting = self.prefix_bytes = 0
        self.runs: set[FakeRun] = set()

    @property
    def active(self) -> int:
        return sum(len(run.job.keys) for run in self.runs)

    @property
    def running_bytes(self) -> int:
        return 1_000 * self.active

    def submit(self, job: Job) -> "FakeRun":
        if self.stopping:
            raise StoppingError("stopping")
        if len(self.runs) >= self.most:
            raise BusyError("full")
        assert job.tokens or job.state
        assert all(0 <= x <= self.vocab_size for x in job.tokens)
        self.jobs.append(job)
        run = FakeRun(self, job)
        self.runs.add(run)
        return run

    def drain(self, seconds: float) -> None:
        self.stopping = True
        until = time.monotonic() + seconds
        while self.runs and time.monotonic() < until:
            time.sleep(0.01)
        for run in list(self.runs):
            run.stopped = True

    def state_bytes(self, tokens: int) -> int:
        return 1_000 + 10 * tokens

    def next(self, last: int, length: int, job: Job, key: int, count: int) -> int:
        if self.script is not None:
            return self.script[count % len(self.script)]
        if job.sampling.temperature == 0:
            return follows(last, length, self.vocab_size)
        return int(uniform(key, count) * self.vocab_size)


class FakeRun:
    """A job of a `FakeEngine`, continued as it is iterated."""

    def __init__(self, engine: FakeEngine, job: Job) -> None:
        self.engine, self.job, self.stopped = engine, job, False

    def cancel(self) -> None:
        self.engine.runs.discard(self)

    def told(self, token: int) -> TokenLogprob:
        top = [((token + i) % self.engine.vocab_size, -0.5 - i) for i in range(self.job.logprobs or 0)]
        return TokenLogprob(token, -0.5, top)

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for event in self.events():
                yield event
        finally:
            self.engine.runs.discard(self)

    async def events(self) -> AsyncIterator[Event]:
        job, before = self.job, self.job.state
        known = None
        if job.prompt_logprobs:
            known = [self.told(x) if i or before else None for i, x in enumerate(job.tokens)]
        await asyncio.sleep(0)
        yield Prompted(before.length if before else 0, known)
        read = (before.length if before else 0) + len(job.tokens)
        last = job.tokens[-1] if job.tokens else before.pending if before else 0
        rows: list[list[int]] = [[] for _ in job.keys]
        ended = [job.limit == 0] * len(rows)
        blocks = 0
        while not all(ended):
            await asyncio.sleep(self.engine.pause)
            if self.stopped:
                raise StoppingError("stopping")
            if time.monotonic() > job.deadline:
                raise TimedOutError("late")
            if blocks and self.engine.fails is not None:
                raise self.engine.fails
            blocks += 1
            for index, row in enumerate(rows):
                if not ended[index]:
                    drawn = self.draw(index, row, last, read)
                    ended[index] = drawn.finish is not None
                    yield drawn
        snapshots = None
        if job.keep:
            snapshots = [self.snapshot(row, last, read) for row in rows]
        yield Finished(snapshots)

    def draw(self, index: int, row: list[int], last: int, read: int) -> Drawn:
        job, new, finish = self.job, list[int](), None
        while len(new) < self.engine.block and finish is None:
            before = row[-1] if row else last
            token = self.engine.next(before, read + len(row), job, job.keys[index], len(row))
            row.append(token)
            new.append(token)
            if any(row[-len(x) :] == x for x in job.stops):
                finish = "stop"
            elif len(row) == job.limit:
                finish = "length"
        if job.watch is not None and (kept := job.watch(index, new)) is not None:
            del row[len(row) - len(new) + kept :]
            new, finish = new[:kept], "stop"
        found = None if job.logprobs is None else [self.told(x) for x in new]
        return Drawn(index, new, found, finish)

    def snapshot(self, row: list[int], last: int, read: int) -> Snapshot:
        pending = row[-1] if row else last
        return Snapshot(DIGEST, read + len(row), pending, {"s": torch.tensor([float(read + len(row))])})


def served(engine: Any = None, **changes: Any) -> Served:
    """A model of bytes."""
    fields = {
        "name": "book",
        "digest": DIGEST,
        "created": 1_700_000_000,
        "vocab_size": BYTES,
        "start_token": False,
        "n_positions": None,
        "shape": None,
        "text": VocabularyText(Vocabulary("text")),
        "engine": engine or FakeEngine(),
        "description": {"mechanisms": ["linear"], "parameters": 10, "weights": "fp32"},
    }
    return Served(**{**fields, **changes})


def pixel_model(engine: Any = None, **changes: Any) -> Served:
    """A model of images of 3 rows of 4 pixels with 16 levels."""
    fields = {"name": "digits", "vocab_size": 16, "start_token": True, "shape": (3, 4), "text": None}
    return served(engine or FakeEngine(16), **{**fields, **changes})


def greedy(prompt: str, count: int) -> list[int]:
    """What a `FakeEngine` of bytes answers at temperature 0."""
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(follows(ids[-1], len(ids), BYTES))
    return ids[len(prompt.encode()) :]


def text_of(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")
