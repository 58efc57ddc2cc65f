"""Truncated back-propagation: the state of each row is carried from batch to batch, without its gradient.

    s_t = f(x_t, s_{t-1}),    L = sum_t l(x_t, s_{t-1}),    ds_{t-1}/dtheta taken as 0 in the gradient of l

A row that continues where the same row of the previous batch ended (`Batch.continues`) starts from the state
at that point; any other row starts from the empty state. Williams and Peng 1990, "An Efficient Gradient-Based
Algorithm for On-Line Training of Recurrent Network Trajectories". For the gradient of whole sequences, see
`unrolled.training.segments`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Batch, UnsupportedError
from unrolled.models.limits import n_positions
from unrolled.ops.state import leaves, map_tensors
from unrolled.training.processes import Processes
from unrolled.training.segments import Continues, check_continues, empty_state

PREFIX = "carried."
"""The prefix of the names of carried states in a checkpoint."""


def check_carried(model: object, batch: Batch) -> None:
    """Check that the states of a model can be carried through batches like `batch`.

    Raises:
        ValueError: the rows of the data do not continue from batch to batch.
        UnsupportedError: the model has no state, or one that grows, or positions for a limited length.
    """
    if batch.continues is None or batch.cu_seqlens is not None:
        raise ValueError(
            "carry_state is True, but the rows of the data do not continue from batch to batch: use "
            "data.order=consecutive, without packed documents"
        )
    after = check_continues(model)
    if (positions := n_positions(model)) is not None:
        raise UnsupportedError(
            f"carry_state is True, but this {type(model).__name__} has {positions} positions, which the text "
            "exceeds: use rotary positions, or none, and no mechanism with positions of its own"
        )
    before = model.init_state(1)  # type: ignore[attr-defined]
    if any(x.shape != y.shape for x, y in zip(leaves(before).values(), leaves(after).values(), strict=True)):
        raise UnsupportedError(
            f"carry_state is True, but the state of this {type(model).__name__} grows with every token: use "
            "mechanisms whose state is constant (`unrolled list`)"
        )


def entering(model: Continues, batch: Batch, carried: Any) -> Any:
    """Return the state before a batch: the carried state for rows that continue, else the empty state."""
    empty, reads_on = empty_state(model, len(batch.inputs)), batch.continues
    if carried is None or reads_on is None:
        return empty
    kept = iter(leaves(carried).values())

    def chosen(x: Tensor) -> Tensor:
        return torch.where(reads_on.to(x.device).view(-1, *[1] * (x.dim() - 1)), next(kept), x)

    return map_tensors(chosen, empty)


def to_tensors(carried: Any, processes: Processes) -> dict[str, Tensor]:
    """Return the carried tensors by name, with the rows of all processes; none before the first update."""
    if carried is None:
        return {}
    own = {f"{PREFIX}{name}": x.cpu() for name, x in leaves(carried).items()}
    parts = processes.gather(own)
    return {name: torch.cat([part[name] for part in parts[:: processes.team_size]]) for name in own}


def of_tensors(model: Continues, tensors: Mapping[str, Tensor], processes: Processes) -> Any:
    """Return the carried state of the rows of this process from `tensors`; None if there is none."""
    found = {name: x for name, x in tensors.items() if name.startswith(PREFIX)}
    if not found:
        return None
    like = empty_state(model, 1)
    rows = iter([found[f"{PREFIX}{name}"].chunk(processes.teams)[processes.team] for name in leaves(like)])
    return map_tensors(lambda x: next(rows).to(x.device, copy=True), like)
