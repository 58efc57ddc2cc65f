"""Operations on states, which are values.

A state is a `NamedTuple` of tensors, batch first; its fields may be tuples of further states. No function
here modifies its argument.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from unrolled.files import load_tensors, save_tensors

Parts = tuple["Tensor | Parts", ...]
State = TypeVar("State", bound=Parts)


def map_tensors(fn: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `fn` to every tensor of a state and return a state of the same structure."""
    mapped = [fn(part) if isinstance(part, Tensor) else map_tensors(fn, part) for part in state]
    return state._make(mapped) if hasattr(state, "_make") else type(state)(mapped)


def leaves(state: Parts, prefix: str = "") -> dict[str, Tensor]:
    """Name every tensor of a state by its path, as in `"layers.0.kv"`."""
    names = getattr(state, "_fields", range(len(state)))
    found: dict[str, Tensor] = {}
    for name, part in zip(names, state, strict=True):
        if isinstance(part, Tensor):
            found[f"{prefix}{name}"] = part
        else:
            found |= leaves(part, f"{prefix}{name}.")
    return found


def raw_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, in the order of its elements: uint8, on the CPU."""
    flat = x.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:  # a single element may have any stride, which `contiguous` keeps
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def select(state: State, rows: Tensor | Sequence[int]) -> State:
    """Select batch rows by index: to fork a prompt, reorder beams or drop rows.

    Raises:
        ValueError: `rows` is a mask, or holds no indices of rows. On a GPU, indices are not checked.
    """
    index = rows if isinstance(rows, Tensor) else torch.tensor(rows, device="cpu")
    if index.dtype == torch.bool:
        raise ValueError("rows is a mask, but must be indices, as from mask.nonzero().flatten()")
    if index.is_floating_point() and index.numel():  # an empty list has no integers
        raise ValueError(f"rows is {index.dtype}, but must be indices, which are integers")
    index = index.long()
    try:
        return map_tensors(lambda x: x.index_select(0, index.to(x.device)), state)
    except IndexError as error:
        n = len(next(iter(leaves(state).values())))
        raise ValueError(
            f"rows is {index.tolist()}, but must be a list of integers from 0 to {n - 1}"
        ) from error


def to(state: State, device: torch.device | str) -> State:
    """Move every tensor of a state to a device."""
    return map_tensors(lambda x: x.to(device), state)


def detach(state: State) -> State:
    """Detach a state from its autograd graph, for truncated back-propagation through time."""
    return map_tensors(Tensor.detach, state)


def nbytes(state: Parts) -> int:
    """Total size of the tensors of a state, in bytes."""
    return sum(x.numel() * x.element_size() for x in leaves(state).values())


def save(state: Parts, path: str | Path) -> None:
    """Write a state to a safetensors file, with a SHA-256 that `load` checks."""
    save_tensors(leaves(state), path)


def load(path: str | Path, like: State) -> State:
    """Read a state written by `save` into the structure of `like`, for example `model.init_state(1)`.

    Sizes may differ from those of `like` (another batch size, a longer cache); names and dtypes may not.

    Raises:
        ValueError: the file is not a safetensors file, was changed after it was saved, or holds other tensors
            than `like`.
    """
    found = load_tensors(path)
    expected = leaves(like)
    if found.keys() != expected.keys():
        raise ValueError(f"{path} holds the tensors {sorted(found)}, but this state has {sorted(expected)}")
    for name, x in expected.items():
        if found[name].dtype != x.dtype or found[name].dim() != x.dim():
            raise ValueError(
                f"{name} in {path} is {found[name].dtype} with {found[name].dim()} dimensions, "
                f"but must be {x.dtype} with {x.dim()}"
            )
    # Copies: tensors mapped from a file may be unaligned, which changes the rounding of some products.
    in_order = iter(found[name].to(x.device, copy=True) for name, x in expected.items())
    return map_tensors(lambda _: next(in_order), like)
