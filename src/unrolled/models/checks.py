"""Refusing wrong input with a sentence that says what was wanted."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import IGNORED
from unrolled.ops.checks import check_device, check_tensor, may_read


def check_ids(name: str, ids: Tensor, n_ids: int, table: Tensor | None = None) -> None:
    """Raise ValueError unless `ids` is [B, T] long, where its table is, and, on a CPU, within [0, n_ids).

    On other devices reading the values would stall the queue, and a compiled graph cannot: there the
    embedding table's own assertion has to do.
    """
    check_tensor(name, ids)
    if ids.dim() != 2 or ids.dtype != torch.long:
        raise ValueError(f"{name} is {ids.dtype} of the shape {list(ids.shape)}, wanted [B, T] of torch.long")
    if table is not None:
        check_device(name, ids, table)
    if ids.device.type == "cpu" and ids.numel() > 0 and not torch.compiler.is_compiling():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= n_ids:
            raise ValueError(f"{name} holds ids from {low} to {high}, wanted ids in [0, {n_ids})")


def check_token(token: Tensor, n_ids: int, table: Tensor) -> None:
    """Raise ValueError unless `token` is one id per row, as `check_ids` wants them of [B, T]."""
    check_tensor("token", token)
    if token.dim() != 1 or token.dtype != torch.long:
        raise ValueError(f"token is {token.dtype} of the shape {list(token.shape)}, wanted torch.long of [B]")
    check_device("token", token, table)
    if may_read(token) and (ids := token.tolist()) and not 0 <= min(ids) <= max(ids) < n_ids:
        raise ValueError(f"token holds ids from {min(ids)} to {max(ids)}, wanted ids in [0, {n_ids})")


def check_layer_states(state: Any, kind: type[Any], rows: int, n_layers: int, table: Tensor) -> None:
    """Raise ValueError unless `state` is a `kind` for that many rows and layers; layers check their own."""
    found: object = state
    if not isinstance(found, kind):
        raise ValueError(
            f"state is a {type(state).__name__}, wanted the {kind.__name__} of init_state or prefill"
        )
    position, layers = state.position, state.layers
    check_tensor("state.position", position)
    check_device("state.position", position, table)
    if position.shape != (rows,) or position.dtype != torch.long:
        raise ValueError(
            f"state.position is {position.dtype} of the shape {list(position.shape)}, "
            f"wanted torch.long of [{rows}]"
        )
    check_parts("state.layers", layers, n_layers)


def check_parts(name: str, parts: object, count: int) -> None:
    """Raise ValueError unless a part of a state is a tuple with one entry per layer."""
    if not isinstance(parts, tuple) or len(parts) != count:
        found = f"a {type(parts).__name__}" + (f" of {len(parts)}" if isinstance(parts, tuple) else "")
        raise ValueError(f"{name} is {found}, but must be a tuple of {count}, one per layer")


def check_targets(targets: Tensor, shape: Sequence[int], levels: int) -> None:
    """Raise ValueError unless `targets` is long, of `shape` and, on a CPU, within [0, levels) or ignored."""
    check_tensor("targets", targets)
    if targets.dtype != torch.long or targets.shape != torch.Size(shape):
        raise ValueError(
            f"targets is {targets.dtype} of the shape {list(targets.shape)}, "
            f"wanted torch.long of the shape {list(shape)}"
        )
    if targets.device.type == "cpu" and targets.numel() > 0 and not torch.compiler.is_compiling():
        asked = targets[targets != IGNORED]
        if asked.numel() and not 0 <= int(asked.min()) <= int(asked.max()) < levels:
            raise ValueError(
                f"targets holds values from {int(asked.min())} to {int(asked.max())}, "
                f"wanted [0, {levels}), or {IGNORED} for none"
            )


def check_story(
    inputs: Tensor, padding: Tensor | None, n_words: int, memory_size: int | None, table: Tensor
) -> Tensor:
    """Return where a story has no word, `[B,M+1,J]` bool.

    Raises:
        ValueError: `inputs` is not [B, M + 1, J] long with M of at least 1 and, unless that is None, at most
            `memory_size`; it is not where the table of words is; on a CPU, its ids are not within
            [0, n_words); or the mask is not as large.
    """
    check_tensor("inputs", inputs)
    found = list(inputs.shape)
    if inputs.dim() != 3 or inputs.dtype != torch.long:
        raise ValueError(f"inputs is {inputs.dtype} of the shape {found}, wanted [B, M + 1, J] of torch.long")
    check_device("inputs", inputs, table)
    if found[1] < 2:
        raise ValueError(
            f"inputs has the shape {found}: a memory of length 0, wanted at least one sentence before "
            "the question, [B, M + 1, J]"
        )
    if found[2] < 1:
        raise ValueError(f"inputs has the shape {found}: sentences of no word, wanted J of at least 1")
    if memory_size is not None and found[1] - 1 > memory_size:
        raise ValueError(f"inputs has {found[1] - 1} sentences, wanted at most memory_size = {memory_size}")
    if inputs.device.type == "cpu" and inputs.numel() and not torch.compiler.is_compiling():
        low, high = (int(x) for x in inputs.aminmax())
        if low < 0 or high >= n_words:
            raise ValueError(f"inputs holds ids from {low} to {high}, wanted ids in [0, {n_words})")
    if padding is None:
        return torch.zeros_like(inputs, dtype=torch.bool)
    if padding.shape != inputs.shape or padding.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask is {padding.dtype} of the shape {list(padding.shape)}, "
            f"wanted torch.bool of the shape {found}"
        )
    return padding
