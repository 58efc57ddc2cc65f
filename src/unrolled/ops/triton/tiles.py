# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""What Triton kernels share: the tokens of a chunk, tiles of memory, and products.

A sequence is cut into chunks of C tokens; the chunks of all sequences are numbered consecutively as slots.

A head and a stride fit into 32 bits, but their product may not, so heads are 64-bit from the start.
"""

import os

import triton
import triton.language as tl

UNSPECIALIZED = ["length", "chunks"]  # one compiled kernel for all lengths
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def place(slot, length, chunks, cu_seqlens, owners, C: tl.constexpr):
    """Return the sequence of a slot, its row in memory, the C tokens of the slot, and which of them exist."""
    if cu_seqlens is not None:
        sequence = tl.load(owners + slot)
        begin = tl.load(cu_seqlens + sequence)
        end = tl.minimum(tl.load(cu_seqlens + sequence + 1), length)
        tokens = begin + (slot - begin // C - sequence) * C + tl.arange(0, C)
        row = tl.zeros([], tl.int64)
    else:
        sequence = slot // chunks
        tokens = slot % chunks * C + tl.arange(0, C)
        end = length
        row = sequence.to(tl.int64)
    return sequence, row, tokens, tokens < end


@triton.jit
def place_sequence(sequence, length, cu_seqlens):
    """Return the row of a sequence in memory, its first token and the one after its last."""
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + sequence)
        end = tl.minimum(tl.load(cu_seqlens + sequence + 1), length)
        row = tl.zeros([], tl.int64)
    else:
        begin = 0
        end = length
        row = sequence.to(tl.int64)
    return row, begin, end


@triton.jit
def sequence_slots(sequence, chunks, cu_seqlens, C: tl.constexpr):
    """Return the first slot of a sequence, and how many it has."""
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + sequence)
        first = begin // C + sequence
        n = tl.cdiv(tl.load(cu_seqlens + sequence + 1) - begin, C)
    else:
        first, n = sequence * chunks, chunks
    return first, n


@triton.jit
def load_tile(x, rows, row_stride, row_exists, columns, column_stride, column_exists):
    """Load x[rows, columns] in its own type, with zeros out of bounds."""
    offsets = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    return tl.load(x + offsets, mask=row_exists[:, None] & column_exists[None, :], other=0)


@triton.jit
def store_tile(x, rows, row_stride, row_exists, columns, column_exists, values):
    """Store x[rows, columns] = values, where columns are adjacent in memory."""
    offsets = rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    tl.store(x + offsets, values.to(x.dtype.element_ty), mask=row_exists[:, None] & column_exists[None, :])


@triton.jit
def product(a, b, total):
    """Return total + a @ b in fp32, rounded about as fp32 is, by the tensor cores.

    Numbers of 16 bits are multiplied as they are: their products are exact in fp32. An operand in fp32 beside
    one in bf16 is the sum of three bf16 numbers, so 3 products of 16 bits are exact too. All else runs as
    "tf32x3", which splits both operands into two tf32 parts and loses 2^-22 of a term, where fp32 loses
    2^-24 of the sum; "ieee" does not run on the tensor cores.
    """
    if a.dtype == b.dtype and a.dtype != tl.float32:
        total = _sixteen_bits(a, b, total)
    elif b.dtype == tl.bfloat16:
        high, middle, low = _three_parts(a.to(tl.float32))
        total = _sixteen_bits(high, b, _sixteen_bits(middle, b, _sixteen_bits(low, b, total)))
    elif a.dtype == tl.bfloat16:
        high, middle, low = _three_parts(b.to(tl.float32))
        total = _sixteen_bits(a, high, _sixteen_bits(a, middle, _sixteen_bits(a, low, total)))
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="tf32x3")
    return total


@triton.jit
def _three_parts(x):
    """Return the bf16 numbers whose sum is x, largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _sixteen_bits(a, b, total):
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 numbers as if they were integers
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total
