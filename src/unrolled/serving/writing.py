"""Drawing continuations."""

import logging
from typing import Any

import torch
from torch import Tensor

from unrolled.decode.batch import Drawing
from unrolled.serving.jobs import Drawn, EngineError, Event, Finished, Run
from unrolled.serving.reading import Reading, logprobs
from unrolled.serving.runner import Runner
from unrolled.serving.snapshot import Snapshot

_LOG = logging.getLogger(__name__)


class _Continuation:
    """A continuation of a prompt, in a row."""

    def __init__(self, reading: Reading, index: int, row: int) -> None:
        self.reading, self.job, self.index, self.row = reading, reading.run.job, index, row
        self.told = 0  # number of tokens sent to the client
        self.paused = False  # whether its row waits for the client


class Writing:
    """Draws tokens for continuations side by side.

    Args:
        runner: runs the model.
        digest: digest of the model.
        count: number of rows.
    """

    def __init__(self, runner: Runner, digest: str, count: int) -> None:
        self._runner, self._digest, self.count = runner, digest, count
        self._rows = runner.rows(count)
        self._free = list(range(count))[::-1]
        self._reserved = 0  # free rows reserved for prompts that are being read
        self._open: dict[int, _Continuation] = {}
        self._snapshots: dict[Run, dict[int, Snapshot | None]] = {}

    @property
    def active(self) -> int:
        """Number of continuations that have not ended."""
        return len(self._open)

    @property
    def unreserved(self) -> int:
        """Number of rows that are free and not reserved."""
        return len(self._free) - self._reserved

    @property
    def waits(self) -> bool:
        """Whether all continuations that have not ended wait for their clients."""
        return all(x.reading.run.behind for x in self._open.values())

    @property
    def runs(self) -> list[Run]:
        """The jobs with continuations that have not ended."""
        return list(self._snapshots)

    def reserve(self, rows: int) -> bool:
        """Reserve free rows; return False if there are not enough."""
        if rows > self.unreserved:
            return False
        self._reserved += rows
        return True

    def give_back(self, rows: int) -> None:
        """Give up reserved rows."""
        self._reserved -= rows

    def begin(self, reading: Reading) -> None:
        """Continue a prompt that was read, in the rows reserved for it."""
        job, run = reading.run.job, reading.run
        self.give_back(len(job.keys))
        self._snapshots[run] = {}
        states = [reading.state, *(self._runner.copy(reading.state, reading.room) for _ in job.keys[1:])]
        for index, (key, state) in enumerate(zip(job.keys, states, strict=True)):
            row = self._free.pop()
            self._open[row] = _Continuation(reading, index, row)  # first, so that an error frees the row
            self._rows.logits[row] = reading.logits[0]
            tells = job.logprobs is not None
            seen = self._seen(reading) if job.sampling.repetition_penalty != 1 else None
            self._rows.start(row, state, Drawing(job.sampling, key, job.limit, job.stops, seen, tells))

    def drop(self, run: Run) -> None:
        """End the continuations of a job."""
        for continuation in [x for x in self._open.values() if x.reading.run is run]:
            self._close(continuation)
        self._snapshots.pop(run, None)

    def draw(self, most: int) -> list[tuple[Run, Event | EngineError]]:
        """Draw up to `most` tokens for every continuation that waits for no client; return the events."""
        for row, x in self._open.items():
            if x.paused != x.reading.run.behind:
                x.paused = not x.paused
                self._rows.pause(row, x.paused)
        drawn = {row: x for row, x in self._open.items() if not x.paused}
        before = {  # states to which rows may have to return, if a stop text is found
            row: self._runner.mark(self._rows.states[row])
            for row, x in drawn.items()
            if x.job.watch and x.job.keep
        }
        self._rows.draw(most)
        told: list[tuple[Run, Event | EngineError]] = []
        for row in self._rows.failed():
            if row in self._open:
                run = self._open[row].reading.run
                told.append((run, EngineError(self._rows.reason(row))))
                self.drop(run)
        active = self._rows.active.tolist()
        for row, continuation in drawn.items():
            if row not in self._open:  # its job has failed
                continue
            try:
                told += self._after(continuation, bool(active[row]), before.get(row))
            except Exception as error:
                _LOG.exception("a continuation failed")
                run = continuation.reading.run
                told.append((run, EngineError(f"a continuation failed: {error}")))
                self.drop(run)
        return told

    def _after(self, x: _Continuation, active: bool, before: Any) -> list[tuple[Run, Event | EngineError]]:
        """Return the events of a continuation after a block, and close it if it has ended."""
        run, row = x.reading.run, x.row
        tokens = self._rows.tokens(row)  # all of its new tokens so far
        new: list[int] = tokens[x.told :].tolist()
        state, kept = self._rows.states[row], None
        if x.job.watch is not None and (kept := x.job.watch(x.index, new)) is not None:
            if before is not None and (kept < len(new) or active):
                state = self._runner.copy(self._runner.back(before), x.reading.room)
                for token in new[: kept - 1]:  # one by one, so that they are rounded as before
                    _, state = self._runner.read(torch.tensor([token]), state, "none")
            new = new[:kept]
        finish, drawn = None, list[int]()
        if kept is not None or not active:
            drawn = tokens[: x.told + len(new)].tolist()
            stopped = kept is not None or any(drawn[-len(ids) :] == ids for ids in x.job.stops)
            finish = "stop" if stopped else "length"
        told = self._rows.told[row]
        probabilities = None
        if told is not None:
            probabilities = logprobs(told[: len(new)], torch.tensor(new), x.job.logprobs or 0)
        x.told += len(new)
        events: list[tuple[Run, Event | EngineError]] = [(run, Drawn(x.index, new, probabilities, finish))]
        if finish is None:
            return events if new else []
        snapshot = self._snapshot(x, drawn, state) if x.job.keep else None
        if kept is None:
            x.reading.keep_all(drawn, state)
        self._close(x)
        done = self._snapshots[run]
        done[x.index] = snapshot
        if len(done) == len(x.job.keys):
            del self._snapshots[run]
            ordered = [done[index] for index in range(len(done))]
            events.append((run, Finished([s for s in ordered if s is not None] if x.job.keep else None)))
        return events

    def _snapshot(self, x: _Continuation, drawn: list[int], state: Any) -> Snapshot:
        length = x.reading.start + len(x.reading.tokens) + len(drawn)
        return Snapshot(self._digest, length, drawn[-1], self._runner.tensors(state))

    def _close(self, x: _Continuation) -> None:
        self._rows.end(x.row, x.told)
        self._rows.states[x.row] = self._rows.told[x.row] = None
        del self._open[x.row]
        self._free.append(x.row)

    def _seen(self, reading: Reading) -> Tensor:
        """Return which tokens of the vocabulary the prompt holds, without those that a state has read."""
        seen = torch.zeros(self._runner.vocab_size + 1, dtype=torch.uint8)  # one more for the start symbol
        seen[torch.tensor(reading.run.job.tokens, dtype=torch.long)] = 1
        return seen[:-1].clone()
