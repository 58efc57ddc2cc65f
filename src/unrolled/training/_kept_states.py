"""A stack of states in a temporary file, so that memory does not grow with their number."""

import math
import tempfile
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unrolled.ops.state import State, leaves, map_tensors, raw_bytes

IN_MEMORY = 2**23
"""Number of bytes up to which the states stay in memory; beyond it, all are moved to the file."""


class _Place(NamedTuple):
    """The offset of a state in the file, and the shapes and dtypes of its tensors."""

    offset: int
    tensors: list[tuple[tuple[int, ...], torch.dtype]]  # not tensors of "meta", which take memory too


class KeptStates:
    """A stack of states: `pop` returns the state that was pushed last.

    If the states were kept as tensors, they would also lie between short-lived tensors and keep the allocator
    from reusing the memory of these: for 131,072 tokens in segments of 4,096, states of 4 MB made the process
    400 MB larger.

    `largest` is the size in bytes of the largest stack that this process has had.
    """

    largest: ClassVar[int] = 0

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 (closed by `close`)
        self._places: list[_Place] = []

    def push(self, state: State) -> None:
        """Push a state.

        Raises:
            OSError: the disk is full.
        """
        tensors = list(leaves(state).values())
        self._places.append(_Place(self._file.seek(0, 2), [(tuple(x.shape), x.dtype) for x in tensors]))
        for x in tensors:
            self._file.write(raw_bytes(x).numpy().data)
        KeptStates.largest = max(KeptStates.largest, self._file.tell())

    def pop(self, like: State) -> State:
        """Remove and return the state that was pushed last, in the structure and on the device of `like`."""
        offset, shapes = self._places.pop()
        self._file.seek(offset)
        tensors = (self._read(*shape) for shape in shapes)
        return map_tensors(lambda x: next(tensors).to(x.device), like)

    def close(self) -> None:
        """Drop all states."""
        self._file.close()

    def _read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        content = bytearray(self._file.read(math.prod(shape) * dtype.itemsize))
        return torch.from_numpy(np.frombuffer(content, np.uint8)).view(dtype).reshape(shape)
