"""The share of a process in the batches of an update.

Every process draws the same batches, since they are a pure function of the step. So it knows the targets of
all batches without communication. There are two ways to divide the batches among the processes:

    whole   each process takes whole micro-batches, if their number is a multiple of the number of processes
    rows    each process takes some rows of every micro-batch

Whole micro-batches keep matrices large, and the weights of a sharded model are gathered less often. With two
processes and one micro-batch for each, the sum of the gradients is bit for bit that of a single process.

Processes that share sequences form a team. All processes of a team have the same share, and each reads a
slice of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from unrolled.contract import IGNORED, Batch
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import count_targets
from unrolled.training.processes import Processes


class Share(NamedTuple):
    """A batch of this process, and the weight of its mean loss in the mean over all targets of the update."""

    batch: Batch
    weight: float


def check_divisible(config: TrainConfig, processes: Processes) -> None:
    """Raise ValueError unless the batches and the weights can be divided evenly among the processes."""
    size, rows = processes.size, config.batch_size
    for name in ("shard", "sequence"):
        if size % (found := getattr(config, name)):
            raise ValueError(f"{name} is {found}, but must divide the number of processes, which is {size}")
    teams = size // config.sequence
    if rows % teams and (config.accumulate % teams or config.carry_state):
        raise ValueError(
            f"batch_size is {rows}, but must be a multiple of {teams}, the number of processes"
            + (f" over sequence = {config.sequence}" if config.sequence > 1 else "")
            + ("" if config.carry_state else ", or accumulate must be")
        )
    if config.segment is not None and config.segment % config.sequence:
        raise ValueError(
            f"segment is {config.segment}, but must be a multiple of sequence = {config.sequence}"
        )


def shares(
    batches: Sequence[Batch], processes: Processes, *, in_rows: bool = False
) -> tuple[list[Share], bool]:
    """Return the shares of this process in an update, and whether they are whole micro-batches.

    Each process gets the same number of shares. Micro-batches without targets are left out. With `in_rows`, a
    process gets its rows of every micro-batch, with or without targets.
    """
    counts = [count_targets(batch) for batch in batches]
    total = sum(counts)
    if in_rows:
        return [_own(batch, processes, total) for batch in batches if total], False
    used = [(batch, count) for batch, count in zip(batches, counts, strict=True) if count]
    if len(used) % processes.teams == 0:
        return [Share(batch, count / total) for batch, count in used[processes.team :: processes.teams]], True
    return [_rows_of(batch, processes, total) for batch, _ in used], False


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Return the rows from `start` to `stop` - 1 of a batch."""
    bounds, length = batch.cu_seqlens, batch.inputs.shape[1] if batch.inputs.dim() > 1 else 1
    cut: dict[str, Any] = {name: None if x is None else x[start:stop] for name, x in batch._asdict().items()}
    if bounds is not None:  # every row begins a sequence, so both ends of the rows are among the bounds
        inside = (bounds >= start * length) & (bounds <= stop * length)
        cut["cu_seqlens"] = bounds[inside] - start * length
    return batch._replace(**cut)


def _own(batch: Batch, processes: Processes, total: int) -> Share:
    """Return the rows of this process."""
    n, team, teams = len(batch.targets), processes.team, processes.teams
    own = rows(batch, n * team // teams, n * (team + 1) // teams)
    return Share(own, count_targets(own) / total)


def _rows_of(batch: Batch, processes: Processes, total: int) -> Share:
    """Return the rows of this process; if none has a target, a row of another process with weight 0.

    Each process must take part in the exchange of gradients, and a loss over no target may be NaN.
    """
    own = _own(batch, processes, total)
    if own.weight:
        return own
    n = len(batch.targets)
    row = int(torch.nonzero((batch.targets != IGNORED).reshape(n, -1).any(1))[0])
    return Share(rows(batch, row, row + 1), 0.0)
