"""The processes of a run, as torchrun starts them: how they communicate, and how they fail together.

Every process runs the same program. Only the first writes files. All processes call the methods of
`Processes` in the same order; a single process communicates with nobody.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unrolled.ops.sequence import Ranks
from unrolled.training._meeting import met

T = TypeVar("T")


class ElsewhereError(RuntimeError):
    """Another process of the run failed. That process reports the reason; this process only has to end."""

    said_elsewhere = True


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        group: process group for communication on the CPU; None if `size` is 1.
        ranks: the team of this process: the processes that share its sequences; None if each process reads
            whole sequences.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    ranks: Ranks | None = None

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    @property
    def team_size(self) -> int:
        """How many processes share a sequence."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def teams(self) -> int:
        """How many teams share the rows of a batch."""
        return self.size // self.team_size

    @property
    def team(self) -> int:
        """The number of the team of this process."""
        return self.rank // self.team_size

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks, on each of them."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over the processes, in fp64 and in one all-reduce."""
        if self.alone:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        found: list[float] = total.tolist()
        return found

    def from_first(self, value: T) -> T:
        """Return the value of the first process, on all processes."""
        if self.alone:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        first: T = values[0]
        return first

    def copy_from_first(self, x: Tensor) -> None:
        """Overwrite a tensor, of the same shape and dtype on all processes, by that of the first process."""
        if not self.alone:
            dist.broadcast(x, src=0, group=self.group if x.device.type == "cpu" else None)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Fail on all processes if the block fails on any.

        The failed process of the lowest rank raises its own error, and all others raise `ElsewhereError`.
        Inside the block, processes may not communicate, unless they all fail together.
        """
        if self.alone:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        own = None if error is None or isinstance(error, ElsewhereError) else str(error)
        outcomes = self.gather((error is not None, own))
        if not any(failed for failed, _ in outcomes):
            return
        culprits = [rank for rank, (_, sentence) in enumerate(outcomes) if sentence is not None]
        if culprits and culprits[0] != self.rank:
            said = outcomes[culprits[0]][1]
            raise ElsewhereError(f"process {culprits[0]} of the run failed: {said}") from error
        raise error or ElsewhereError("another process of the run failed")

    def fail(self, error: Exception) -> Exception:
        """Return what to raise for an error that all processes have found: the first process reports it."""
        return error if self.first else ElsewhereError(f"process 0 of the run failed: {error}")

    @contextmanager
    def losing_others(self) -> Iterator[None]:
        """Turn the error of a connection that broke because another process died into `ElsewhereError`."""
        try:
            yield
        except RuntimeError as error:
            broken = isinstance(error, dist.DistError) or "gloo" in str(error)
            if self.alone or not broken or isinstance(error, ElsewhereError):
                raise
            raise ElsewhereError("another process of the run has ended") from error


ALONE = Processes()


@contextmanager
def joined() -> Iterator[Processes]:
    """Yield the processes that torchrun started, or those of torch's process group, or else `ALONE`.

    Inside the block, torch's process group exists if there are several processes. Each process uses the GPU
    of its rank on the machine.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    begins = dist.is_available() and started and not dist.is_initialized()
    if begins:
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if cuda and local < torch.cuda.device_count():
            torch.cuda.set_device(local)
        store, rank, size = met()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield ALONE
        return
    group = dist.new_group(backend="gloo")  # for communication on the CPU, whatever sends the gradients
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), group)
    finally:
        dist.destroy_process_group(None if begins else group)
