"""The check of a state that is passed in: it must be of this layer, and all of its tensors must fit."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.checks import shape
from unrolled.ops.precision import autocast_dtype

Growing = Mapping[str, "tuple[int, str] | Growing"]
"""Maps each field that grows with the number of tokens to its axis and a letter.

Fields with the same letter have equal lengths. A field that is itself a state maps to the `Growing` of that
state; if it is missing here, this mapping applies to it too.
"""

CONSTANT: Growing = {}
"""The `Growing` of a state that does not grow."""


class Field(NamedTuple):
    """The tensor that a field of a state must be."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]  # without the batch; along `axis`, the smallest size allowed
    axis: int  # the axis that may be longer; 0 for none
    letter: str

    def fits(self, x: object, rows: int, device: torch.device, lengths: dict[str, int]) -> bool:
        """Whether `x` is such a tensor. The first field with a letter sets the length of all with it."""
        if not isinstance(x, Tensor) or x.dtype is not self.dtype or x.device != device:
            return False
        found, axis = x.shape, self.axis
        if not axis:
            return found == (rows, *self.sizes)
        if len(found) <= axis:
            return False
        length = found[axis]
        sizes = (rows, *self.sizes[: axis - 1], length, *self.sizes[axis:])
        fits = found == sizes and length >= self.sizes[axis - 1]
        return fits and length == lengths.setdefault(self.letter, length)

    def described(self, rows: int, device: torch.device, lengths: dict[str, int]) -> str:
        """Describe such a tensor for an error message."""
        sizes: list[int | str] = [rows, *self.sizes]
        if self.axis:
            sizes[self.axis] = lengths.get(self.letter, f"{self.letter} >= {sizes[self.axis]}")
        return f"{self.dtype} [{', '.join(map(str, sizes))}] on {device} for {rows} rows"


class Structure(NamedTuple):
    """The type of a state and its fields, some of which may be states themselves."""

    name: str
    kind: type
    parts: tuple["Field | Structure", ...]
    own_letters: bool  # whether its lengths are independent of those of the state around it


def check_state(
    module: Any,
    state: object,
    rows: int,
    like: Tensor,
    empty: Callable[[], tuple[object, ...]] | None = None,
    *,
    name: str = "state",
    growing: Growing | None = None,
) -> None:
    """Require a state of `module` for `rows` rows, on the device of its weight `like`.

    `growing` says which fields grow; it is `module.growing` by default. The expected types and shapes are
    those of a state with no rows, which `empty` makes once per dtype of the weights. By default, `empty`
    is `init_state(0)`. No values are read.

    Raises:
        ValueError: a state of another type, or tensors of another number, dtype, shape or device.
    """
    known: dict[tuple[str, torch.dtype, torch.dtype | None], Structure] = {}
    if not torch.compiler.is_compiling():  # while compiling, making the empty state costs nothing
        known = module.__dict__.setdefault("_state_structures", known)
    key = (name, like.dtype, autocast_dtype(like.device))
    before = known.get(key)
    if before is None or not _passes(state, before, rows, like.device):  # a part may have been replaced since
        made = module.init_state(0) if empty is None else empty()
        known[key] = _structure(name, made, module.growing if growing is None else growing, True)
        _check(state, known[key], rows, like.device, name, {})


def _passes(state: object, expected: Structure, rows: int, device: torch.device) -> bool:
    try:
        _check(state, expected, rows, device, expected.name, {})
    except ValueError:
        return False
    return True


def _structure(name: str, state: tuple[object, ...], growing: Growing, own_letters: bool) -> Structure:
    parts: list[Field | Structure] = []
    for field, x in zip(getattr(state, "_fields", range(len(state))), state, strict=True):
        grows = growing.get(field)
        if isinstance(x, Tensor):
            axis, letter = grows if isinstance(grows, tuple) else (0, "")
            parts.append(Field(str(field), x.dtype, tuple(x.shape[1:]), axis, letter))
        elif isinstance(x, tuple):
            own = grows if isinstance(grows, Mapping) else None
            parts.append(_structure(str(field), x, growing if own is None else own, own is not None))
    return Structure(name, type(state), tuple(parts), own_letters)


def _check(
    state: object, expected: Structure, rows: int, device: torch.device, name: str, lengths: dict[str, int]
) -> None:
    kind, parts = expected.kind, expected.parts
    if not isinstance(state, kind) or not isinstance(state, tuple) or len(state) != len(parts):
        raise ValueError(
            f"{name} is a {type(state).__name__}, but must be a {kind.__name__} of {len(parts)} parts, "
            "from init_state or prefill of this layer"
        )
    for x, part in zip(state, parts, strict=True):
        if isinstance(part, Structure):
            inner = {} if part.own_letters else lengths
            _check(x, part, rows, device, f"{name}.{part.name}", inner)
        elif not part.fits(x, rows, device, lengths):
            found = f"{x.dtype} {shape(x)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            expected_tensor = part.described(rows, device, lengths)
            raise ValueError(f"{name}.{part.name} is {found}, but must be {expected_tensor}")
