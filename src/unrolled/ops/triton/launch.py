"""How Triton kernels are launched: tokens cut into chunks, sizes of blocks, tensors with strides."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Tokens cut into chunks. All fields but the first are arguments of the kernels, for `tiles.place`.

    Chunk c of a packed sequence n that begins at token t has slot t // C + n + c. No two sequences share a
    slot, and there are T // C + N slots, whatever the offsets are.
    """

    n: int
    length: int  # tokens per row of memory
    chunks: int  # per sequence, if all have the same length
    cu_seqlens: Tensor | None
    owners: Tensor | None  # [n] the sequences of the slots

    @classmethod
    def cut(cls, rows: int, length: int, cu_seqlens: Tensor | None, C: int) -> "Slots":
        """Cut `rows` of one length, or the packed sequences of the only row."""
        if cu_seqlens is None:
            chunks = blocks(length, C)
            return cls(rows * chunks, length, chunks, None, None)
        sequences = cu_seqlens.shape[0] - 1
        n = length // C + sequences
        numbers = torch.arange(n, dtype=torch.int32, device=cu_seqlens.device)
        ends = cu_seqlens[1:] // C + numbers[:sequences] + 1
        owners = torch.searchsorted(ends, numbers, right=True, out_int32=True)
        return cls(n, length, 0, cu_seqlens.contiguous(), owners)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Launch a kernel, unless the grid is empty."""
    if 0 not in grid:
        kernel[grid](*arguments, **options)


def multiplies_from_memory(device: torch.device) -> bool:
    """Whether tensor cores read factors from shared memory, so that tiles may be larger.

    They do on Hopper and on data-centre Blackwell (B200, B300), but not on GeForce RTX 50 (capability 12.0).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def recording(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, so that nothing runs yet."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def with_strides(x: Tensor | None) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """Return a tensor and its strides, or twice None: two arguments of a kernel."""
    return (None, None) if x is None else (x, x.stride())


def blocks(width: int, block: int) -> int:
    """Return how many blocks cover a width."""
    return -(-width // block)


def block(width: int, longest: int | None = None) -> int:
    """Return the power of two that covers a width, from 16 (the smallest for tensor cores) to `longest`."""
    covering = 1 << (width - 1).bit_length()
    return max(16, covering if longest is None else min(longest, covering))
