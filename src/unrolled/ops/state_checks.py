"""One check of a state that is passed in: that it is one of this layer, and that all of its tensors fit."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.checks import shape

Growing = Mapping[str, Any]
"""Fields that are longer after more tokens: along which axis, and a letter for those of one length.

Of a field that is a state of its own, the `Growing` of that state; without it, this one holds for it too.
"""

CONSTANT: Growing = {}
"""Of a state that does not grow."""


class Field(NamedTuple):
    """What a tensor of a state must be."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]  # without the batch; along `axis` the least
    axis: int  # that may be longer; 0 for none
    letter: str

    def fits(self, x: Any, rows: int, device: torch.device, lengths: dict[str, int]) -> bool:
        """Whether `x` is that. The first field of a letter says how long those after it must be."""
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

    def told(self, rows: int, device: torch.device, lengths: dict[str, int]) -> str:
        """Say what is wanted."""
        sizes: list[Any] = [rows, *self.sizes]
        if self.axis:
            sizes[self.axis] = lengths.get(self.letter, f"{self.letter} >= {sizes[self.axis]}")
        return f"{self.dtype} [{', '.join(map(str, sizes))}] on {device} for {rows} rows"


class Wanted(NamedTuple):
    """What a state must be; some of its parts may be states of their own."""

    kind: type
    parts: tuple[Any, ...]  # each a Field, or its name, what it must be, and whether its letters are its own


def check_state(
    module: Any,
    state: Any,
    rows: int,
    like: Tensor,
    empty: Callable[[], Any] | None = None,
    *,
    name: str = "state",
    growing: Growing | None = None,
) -> None:
    """Require a state of `module` for `rows` rows, on the device of its weight `like`.

    `growing`, by default `module.growing`, says which fields grow. Types and shapes are those of a state of
    no rows, made by `empty`, by default `init_state(0)`, once per type of the weights. No values are read.

    Raises:
        ValueError: a state of another type, or tensors of another number, type, shape or device.
    """
    known: dict[tuple[str, torch.dtype], Wanted] = {}
    if not torch.compiler.is_compiling():  # where what is made and not used costs nothing
        known = module.__dict__.setdefault("_wanted_states", known)
    if (key := (name, like.dtype)) not in known:
        made = module.init_state(0) if empty is None else empty()
        known[key] = _wanted(made, module.growing if growing is None else growing)
    _check(state, known[key], rows, like.device, name, {})


def _wanted(state: Any, growing: Growing) -> Wanted:
    parts: list[Any] = []
    names: Any = getattr(state, "_fields", range(len(state)))
    for name, x in zip(names, state, strict=True):
        if isinstance(x, Tensor):
            axis, letter = growing.get(name, (0, ""))
            parts.append(Field(str(name), x.dtype, tuple(x.shape[1:]), axis, letter))
        else:
            own = growing.get(name)
            parts.append((str(name), _wanted(x, growing if own is None else own), own is not None))
    return Wanted(type(state), tuple(parts))


def _check(
    state: Any, wanted: Wanted, rows: int, device: torch.device, name: str, lengths: dict[str, int]
) -> None:
    kind, parts = wanted
    given: Any = state
    if not isinstance(state, kind) or len(given) != len(parts):
        raise ValueError(
            f"{name} is a {type(state).__name__}, but must be a {kind.__name__} of {len(parts)} parts, "
            "from init_state or prefill of this layer"
        )
    for x, part in zip(given, parts, strict=True):
        if not isinstance(part, Field):
            field, inner, apart = part
            _check(x, inner, rows, device, f"{name}.{field}", {} if apart else lengths)
        elif not part.fits(x, rows, device, lengths):
            found = f"{x.dtype} {shape(x)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            this_layer = part.told(rows, device, lengths)
            raise ValueError(f"{name}.{part.name} is {found}, but must be {this_layer}")
