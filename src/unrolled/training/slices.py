"""Sequences that several processes share, each with a slice of every segment (`TrainConfig.sequence`).

The processes of a run form teams: with P processes in a team, process r is rank r mod P of team r // P.
Batches are divided among the teams, and each rank of a team reads its own columns of the same rows:

    segment    0 ... S - 1         S ... 2 S - 1       (one of all tokens, if the run has no segments)
    rank 0     0 ... S/P - 1       S ... S + S/P - 1
    rank 1     S/P ... 2 S/P - 1   S + S/P ... S + 2 S/P - 1

`unrolled.ops.sequence` describes what the ranks exchange. The loss and the gradient of a rank are those of
its own targets, so they are summed over all processes, as without slices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from unrolled.contract import IGNORED, Batch, UnsupportedError
from unrolled.ops.sequence import Ranks, use
from unrolled.training.config import TrainConfig
from unrolled.training.processes import Processes
from unrolled.training.segments import check_continues


@contextmanager
def teams(processes: Processes, config: TrainConfig) -> Iterator[Processes]:
    """Yield the processes of a run, in teams of `config.sequence` processes."""
    if config.sequence == 1:
        yield processes
        return
    group, _ = dist.new_subgroups(config.sequence)  # type: ignore[no-untyped-call]
    try:
        yield replace(processes, ranks=Ranks(group))
    finally:
        dist.destroy_process_group(group)


def check_slices(model: object, batch: Batch, config: TrainConfig, ranks: Ranks) -> None:
    """Check that a model can read slices of batches like `batch`; all ranks call it.

    Raises:
        UnsupportedError: the model or one of its mechanisms cannot read slices, or sequences are packed.
        ValueError: rows whose states are carried cannot be cut into slices of equal length.
    """
    if batch.cu_seqlens is not None:
        raise UnsupportedError("packed sequences cannot be shared by processes: use sequence=1")
    with use(ranks):
        check_continues(model)
    length = batch.inputs.shape[1]
    if config.carry_state and length % ranks.size:  # padding would enter the states
        raise ValueError(
            f"with carry_state, the length of the rows must be a multiple of sequence = {ranks.size}, but it "
            f"is {length}"
        )


def slice_of(batch: Batch, ranks: Ranks, segment: int | None) -> Batch:
    """Return the columns of this rank: its parts of all segments, concatenated.

    Rows are padded at the end to a multiple of the number of ranks. The padding changes nothing before it,
    and has no targets.
    """
    length = batch.inputs.shape[1]
    full = length + -length % ranks.size

    def columns(x: Tensor, filling: float) -> Tensor:
        segments = torch.split(pad(x, (0, full - length), value=filling), segment or full, dim=1)
        return torch.cat([part.chunk(ranks.size, dim=1)[ranks.rank] for part in segments], dim=1)

    padding = batch.key_padding_mask
    return batch._replace(
        inputs=columns(batch.inputs, 0),
        targets=columns(batch.targets, IGNORED),
        key_padding_mask=None if padding is None else columns(padding, True),
    )
