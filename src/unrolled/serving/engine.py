"""The engine: one thread that reads prompts and continues sequences side by side.

In a loop, the thread drops jobs that were given up, takes jobs from the queue, reads chunks of prompts,
draws a block of tokens for all rows, and delivers the results. Only this thread touches states, rows and
prefixes.
"""

import logging
import threading
import time
from collections import deque
from typing import TypedDict

import torch

from unrolled.serving.jobs import (
    BusyError,
    Drawn,
    EngineError,
    Event,
    Finished,
    Job,
    Prompted,
    Run,
    StoppingError,
    TimedOutError,
    TooLargeError,
)
from unrolled.serving.prefixes import Prefixes
from unrolled.serving.reading import Reading
from unrolled.serving.runner import Runner
from unrolled.serving.waiting import Waiting
from unrolled.serving.writing import Writing

BLOCK_SECONDS = 0.02  # of drawing in an iteration, which is the time between two messages to a client
LONGEST_BLOCK = 256
_LOG = logging.getLogger(__name__)


class _Entry:
    """A job in the engine."""

    def __init__(self, run: Run, nbytes: int) -> None:
        self.run, self.job, self.nbytes = run, run.job, nbytes

    @property
    def client(self) -> str:
        return self.job.client


class Limits(TypedDict, total=False):
    """Bounds of an engine; see `Engine`, which has the defaults."""

    rows: int
    memory: int
    prefix_memory: int
    queue: int
    threads: int | None


class Engine:
    """Runs jobs on one model.

    Args:
        runner: runs the model.
        digest: digest of the model for snapshots, 64 hex digits.
        rows: maximum number of continuations at a time.
        memory: maximum memory in bytes for the states of all running jobs.
        prefix_memory: maximum memory in bytes for the prompts and states that are kept for other prompts.
        queue: maximum number of jobs that wait for others to end.
        chunk: maximum number of tokens of a prompt that are read at once.
        threads: number of threads of the kernels; None for torch's number.

    Attributes:
        counts: numbers of tokens so far that were "read", "cached" (not read again) and "drawn", and the
            number of "blocks" of drawing with the "seconds" that they took.

    Raises:
        ValueError: the memory is too small for any job.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        digest: str,
        rows: int = 256,
        memory: int = 4 * 2**30,
        prefix_memory: int = 2**28,
        queue: int = 256,
        chunk: int = 256,
        threads: int | None = None,
    ) -> None:
        if memory < (least := runner.nbytes(1)):
            raise ValueError(f"memory is {memory} bytes, but one state takes {least}")
        self.runner, self.digest, self.chunk = runner, digest, chunk
        self.memory, self.queue = memory, queue
        self.counts = {"read": 0, "cached": 0, "drawn": 0, "blocks": 0, "seconds": 0.0}
        self._threads = threads
        self._prefixes = Prefixes(prefix_memory)
        self._writing = Writing(runner, digest, rows)
        self._reading: deque[Reading] = deque()
        self._running: dict[Run, _Entry] = {}
        self._used = 0  # bytes of the running jobs
        self._block = 1
        self._told: list[tuple[Run, Event | EngineError]] = []
        self._changed = threading.Condition()
        self._waiting: Waiting[_Entry] = Waiting()  # guarded by `_changed`, like the next two
        self._draining = self._closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # ---- what other threads call

    def submit(self, job: Job) -> Run:
        """Queue a job; called in the thread of an event loop.

        Raises:
            BusyError: the queue is full.
            TooLargeError: the job, or all jobs of its request together, would never fit.
            StoppingError: the engine is shutting down.
        """
        entry = _Entry(Run(job, self._wake), self._nbytes(job))
        if entry.nbytes > self.memory:
            raise TooLargeError(f"the states would take {entry.nbytes} bytes, but {self.memory} are the most")
        if len(job.keys) > self._writing.count:
            raise TooLargeError(f"{len(job.keys)} continuations, but {self._writing.count} are the most")
        at_once = min(self._writing.count // len(job.keys), self.memory // max(entry.nbytes, 1))
        if job.together > (most := at_once + self.queue):
            raise TooLargeError(f"{job.together} prompts, but {most} are the most")
        with self._changed:
            if self._draining:
                raise StoppingError("the server is shutting down")
            if self._blocked([*self._waiting, entry]) > self.queue:
                raise BusyError(f"{len(self._waiting)} requests are waiting already")
            self._waiting.add(entry)
            self._changed.notify()
        return entry.run

    def _blocked(self, entries: list[_Entry]) -> int:
        """Return how many of these jobs, which start in this order, would have to wait for others to end."""
        rows, memory = self._writing.unreserved, self.memory - self._used
        for place, entry in enumerate(entries):
            rows, memory = rows - len(entry.job.keys), memory - entry.nbytes
            if rows < 0 or memory < 0:
                return len(entries) - place
        return 0

    @property
    def most(self) -> int:
        """Maximum number of jobs that run or wait."""
        return self._writing.count + self.queue

    @property
    def waiting(self) -> int:
        """Number of jobs that wait."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """Number of continuations that are being drawn."""
        return self._writing.active

    @property
    def running_bytes(self) -> int:
        """Memory in bytes that running jobs have reserved for their states."""
        return self._used

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the states and tokens that are kept for other prompts."""
        return self._prefixes.nbytes

    def state_bytes(self, tokens: int) -> int:
        """Bytes of the state of one sequence of that many tokens."""
        return self.runner.nbytes(tokens)

    def drain(self, seconds: float) -> None:
        """Refuse new jobs, wait for the other jobs, and fail those that are not done after `seconds`."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        self._thread.join(seconds)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _nbytes(self, job: Job) -> int:
        before = 0 if job.state is None else job.state.length
        return len(job.keys) * self.runner.nbytes(before + len(job.tokens) + job.limit)

    # ---- the thread

    @torch.no_grad()
    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        error: EngineError = StoppingError("the server is shutting down")
        try:
            while self._wait():
                self._drop()
                self._admit()
                self._read()
                self._draw()
                self._tell()
        except Exception:  # no client may wait for an engine that has ended
            _LOG.exception("the engine failed")
            error = EngineError("the engine failed")
        with self._changed:
            self._draining = True
            left = [*self._running, *(entry.run for entry in self._waiting.remove(lambda _: True))]
        self._told += [(run, error) for run in left]
        self._tell()

    def _wait(self) -> bool:
        """Wait for something to do; return False if the engine is to end."""
        with self._changed:
            if self._writing.active and self._writing.waits and not self._reading:
                self._changed.wait(BLOCK_SECONDS)  # nothing signals that a client took events: look again
            while not (self._waiting or self._running or self._draining or self._closed):
                self._changed.wait()
            return not self._closed and bool(self._waiting or self._running or not self._draining)

    def _drop(self) -> None:
        """Drop jobs that were given up or whose deadline has passed."""
        now = time.monotonic()
        with self._changed:
            gone = self._waiting.remove(lambda entry: entry.run.cancelled or entry.job.deadline <= now)
        late = TimedOutError("the request took longer than the server allows")
        self._told += [(entry.run, late) for entry in gone if not entry.run.cancelled]
        for run in list(self._running):
            if run.cancelled:
                self._release(run)
            elif run.job.deadline <= now:
                self._end(run, late)

    def _admit(self) -> None:
        """Start waiting jobs in turn, as long as there is room."""
        while True:
            with self._changed:
                entry = self._waiting.first()
                if entry is None or self._used + entry.nbytes > self.memory:
                    return
                if not self._writing.reserve(len(entry.job.keys)):
                    return
                self._waiting.take()
                self._used += entry.nbytes
            self._running[entry.run] = entry
            try:
                self._reading.append(Reading(entry.run, self.runner, self._prefixes))
            except Exception as error:  # of any type: it must end only this job, not the engine
                _LOG.exception("a job could not be started")
                self._writing.give_back(len(entry.job.keys))
                self._end(entry.run, EngineError(str(error)))

    def _read(self) -> None:
        """Read chunks of prompts in turn for about as long as a block of drawing takes."""
        until = time.perf_counter() + BLOCK_SECONDS
        while self._reading:
            self._read_chunk(self._reading[0])
            if time.perf_counter() >= until:
                return

    def _read_chunk(self, reading: Reading) -> None:
        self._reading.rotate(-1)
        run = reading.run
        try:
            self.counts["read"] += reading.advance(self.chunk)
            if not reading.done:
                return
            self._told.append((run, Prompted(reading.cached, reading.logprobs)))
            if run.job.limit:
                self._reading.remove(reading)
                self._writing.begin(reading)
            else:
                self._end(run, Finished(reading.snapshots(self.digest)))
        except Exception as error:
            _LOG.exception("a prompt could not be read")
            self._end(run, EngineError(f"the prompt could not be read: {error}"))
            return
        self.counts["cached"] += reading.cached

    def _draw(self) -> None:
        """Draw a block of tokens for all rows."""
        if self._writing.waits:
            return
        began = time.perf_counter()
        try:
            written = self._writing.draw(self._block)
        except Exception as error:
            _LOG.exception("tokens could not be drawn")
            failure = EngineError(f"tokens could not be drawn: {error}")
            written = [(run, failure) for run in self._writing.runs]
        took = time.perf_counter() - began
        if took < BLOCK_SECONDS / 2:
            self._block = min(2 * self._block, LONGEST_BLOCK)
        elif took > BLOCK_SECONDS:
            self._block = max(self._block // 2, 1)
        self.counts["blocks"] += 1
        self.counts["seconds"] += took
        for run, event in written:
            if isinstance(event, Finished | EngineError):
                self._end(run, event)
            else:
                self.counts["drawn"] += len(event.tokens) if isinstance(event, Drawn) else 0
                self._told.append((run, event))

    def _end(self, run: Run, event: Finished | EngineError) -> None:
        self._release(run)
        self._told.append((run, event))

    def _release(self, run: Run) -> None:
        """Forget a job, and free its memory and its rows, drawn or reserved."""
        if (entry := self._running.pop(run, None)) is None:
            return
        self._used -= entry.nbytes
        before = len(self._reading)
        self._reading = deque(reading for reading in self._reading if reading.run is not run)
        if len(self._reading) < before:
            self._writing.give_back(len(run.job.keys))
        self._writing.drop(run)

    def _tell(self) -> None:
        """Deliver the events, those of each event loop in one call."""
        told, self._told = self._told, []
        for run, _ in told:
            run.told += 1
        loops = {run.loop for run, _ in told}
        for loop in loops:
            own = [(run, event) for run, event in told if run.loop is loop]
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:  # the loop was closed: nobody listens
                continue


def _deliver(told: list[tuple[Run, Event | EngineError]]) -> None:
    for run, event in told:
        run.deliver(event)
