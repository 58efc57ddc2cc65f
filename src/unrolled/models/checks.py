"""Checks of what models are given; each failure is one sentence that names the argument."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unrolled.contract import IGNORED
from unrolled.ops.checks import check_device, check_key_padding_mask, check_tensor, shape, wrong
from unrolled.ops.observing import may_read


def check_ids(name: str, ids: Tensor, n_ids: int, table: Tensor | None = None, axes: str = "[B, T]") -> None:
    """Raise ValueError unless `ids` is long with these axes, on the device of `table`, and in [0, n_ids).

    Values are checked on a CPU only: on other devices, reading them would stall the queue, and a compiled
    graph cannot read them. In these cases, only the assertion in torch's embedding remains.
    """
    check_tensor(name, ids)
    if ids.dim() != axes.count(",") + 1 or ids.dtype != torch.long:
        raise wrong(name, ids, f"torch.long {axes}")
    if table is not None:
        check_device(name, ids, table)
    if may_read(ids) and ids.numel():
        # a list is faster for the few ids of a step
        found = ids.tolist() if ids.dim() == 1 else [int(x) for x in ids.aminmax()]
        low, high = min(found), max(found)
        if low < 0 or high >= n_ids:
            raise ValueError(f"{name} holds ids from {low} to {high}, but they must be in [0, {n_ids})")


def check_source(source: Tensor, padding: Tensor | None, n_ids: int, table: Tensor) -> None:
    """Raise ValueError unless `source` holds ids [B, S], with at least one token in each row."""
    check_ids("source", source, n_ids, table, "[B, S]")
    if padding is not None:
        check_key_padding_mask(padding, *source.shape)
        check_device("key_padding_mask", padding, source, "the source is")
    if source.shape[1] == 0:
        raise ValueError(f"source has shape {shape(source)}, but must have at least one token in each row")
    if padding is not None and may_read(padding) and (empty := padding.all(1)).any():
        row = int(empty.nonzero()[0])
        raise ValueError(f"row {row} of source is nothing but padding, but must have at least one token")


class LayerStates(Protocol):
    """A state of a model: how many tokens it has read [B], and a state for each layer."""

    @property
    def position(self) -> Tensor:
        """The number of tokens read, [B] long."""

    @property
    def layers(self) -> tuple[object, ...]:
        """The state of each layer."""


def check_layer_states(
    state: object, kind: type[LayerStates], rows: int, n_layers: int, table: Tensor
) -> None:
    """Raise ValueError unless `state` is a `kind` for that many rows and layers; layers check their own."""
    if not isinstance(state, kind):
        raise wrong("state", f"a {type(state).__name__}", f"the {kind.__name__} of init_state or prefill")
    position = state.position
    check_tensor("state.position", position)
    check_device("state.position", position, table)
    if position.shape != (rows,) or position.dtype != torch.long:
        raise wrong("state.position", position, f"torch.long [{rows}]")
    check_parts("state.layers", state.layers, n_layers)


def check_parts(name: str, parts: object, count: int) -> None:
    """Raise ValueError unless a part of a state is a tuple with one entry per layer."""
    if not isinstance(parts, tuple) or len(parts) != count:
        found = f"a {type(parts).__name__}" + (f" of {len(parts)}" if isinstance(parts, tuple) else "")
        raise ValueError(f"{name} is {found}, but must be a tuple of {count}, one per layer")


def check_targets(
    targets: Tensor, expected: Sequence[int], levels: int, padding: Tensor | None = None
) -> Tensor:
    """Return `targets`, ignored at `padding`, a mask of the same shape.

    Raise ValueError unless they are long, of that shape and, on a CPU, in [0, levels) or ignored.
    """
    check_tensor("targets", targets)
    if targets.dtype != torch.long or targets.shape != torch.Size(expected):
        raise wrong("targets", targets, f"torch.long {list(expected)}")
    if padding is not None:
        targets = targets.masked_fill(padding, IGNORED)
    if may_read(targets) and (asked := targets[targets != IGNORED]).numel():
        low, high = (int(x) for x in asked.aminmax())
        if low < 0 or high >= levels:
            classes = f"in [0, {levels}), or {IGNORED} for none"
            raise ValueError(f"targets holds values from {low} to {high}, but they must be {classes}")
    return targets
