"""A program: the instructions by which the C++ kernel computes the logits of the next token.

Values are places in the scratch memory of a token, reused after each layer; see `unrolled.decode.builder`.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor

from unrolled.contract import UnsupportedError
from unrolled.decode.packing import Packed

KEY_BLOCK = 16  # tokens whose keys lie together
MOST_POSITIONS = 1 << 48  # of any model; so far below 2^63 that no sum of lengths overflows


class Value(NamedTuple):
    """Numbers of a token.

    Attributes:
        place: where they begin in its scratch memory.
        size: how many they are.
    """

    place: int
    size: int

    def part(self, begin: int, size: int) -> "Value":
        """Return `size` of these numbers, from number `begin` on."""
        return Value(self.place + begin, size)

    def split(self, sizes: Sequence[int]) -> list["Value"]:
        """Return consecutive parts of these sizes."""
        return [self.part(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


class Heads(NamedTuple):
    """Sizes of attention over heads: numbers of heads, and widths of one.

    Attributes:
        heads: number of outputs.
        groups: number of values, each with a state.
        queries: number of queries, a divisor of `heads`.
        keys: number of keys, a divisor of `groups`.
        features: width of a query and of a key.
        values: width of a value.
    """

    heads: int
    groups: int
    queries: int
    keys: int
    features: int
    values: int


class Slot(NamedTuple):
    """A part of the state of one layer.

    Attributes:
        kind: "convolution", "average", "scan", "recurrence", "window" or "cache".
        place: where it begins in the state of a sequence; for a cache, in floats per token.
        sizes: its axes without the batch; for a window or a cache [groups, window, features], of the keys.
        values: width of a value.
        divided: for a recurrence, whether the sums of keys follow its state.
        averaged: for a recurrence, whether the sums of the keys' factors follow the sums of keys.
        part: for a convolution, the name of the last inputs in the state of the layer.
    """

    kind: str
    place: int
    sizes: tuple[int, ...]
    values: int = 0
    divided: bool = False
    averaged: bool = False
    part: str = ""


class Constants(NamedTuple):
    """Parts of the state of a layer that never change, by name, each for one row `[1,...]`."""

    parts: dict[str, Tensor]


class Program(NamedTuple):
    """A finished program.

    Attributes:
        instructions: the structs, in order.
        fields: fields of the struct `Program` in C++ that do not change.
        kept: tensors that the instructions point to.
        packed: the matrices, by the name of their layer.
        others: all other parameters and buffers, by name, in fp32; embeddings in the type of tables.
        state_size: floats of the state of a sequence.
        cache: sizes of the parts of the cache of a sequence, in floats per token.
        slots: the parts of the state of each layer.
        most_positions: number of positions; `MOST_POSITIONS` for any that occurs.
    """

    instructions: ctypes.Array[ctypes.c_char]
    fields: dict[str, int]
    kept: list[Tensor]
    packed: dict[str, Packed]
    others: dict[str, Tensor]
    state_size: int
    cache: list[int]
    slots: list[list[Slot | Constants]]
    most_positions: int

    def __deepcopy__(self, memo: object) -> "Program":
        """Return the program itself: it never changes, and its instructions hold addresses of its tensors."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a plan cannot be pickled: save it, or plan the model again")

    @property
    def address(self) -> int:
        """The address of the instructions."""
        return ctypes.addressof(self.instructions)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, those of views once."""
        every = [*self.kept, *self.others.values()]
        end = total = 0
        for first, last in sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in every):
            total += max(0, last - max(first, end))
            end = max(end, last)
        return total


def require(module: object, *kinds: type) -> None:
    """Raise UnsupportedError unless a module is of exactly one of these classes: a subclass may do more."""
    kind = type(module)
    if kind in kinds:
        return
    if hasattr(module, "base_layer"):
        raise UnsupportedError(
            f"a plan cannot run {kind.__module__}.{kind.__name__}, which is an adapter: merge it into the "
            "weights first, with merge_and_unload() of peft"
        )
    if hasattr(module, "_orig_mod"):
        raise UnsupportedError("a plan cannot run a compiled model: plan the model before torch.compile")
    raise UnsupportedError(f"a plan cannot run {kind.__name__}")
