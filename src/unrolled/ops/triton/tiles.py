# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""What Triton kernels share: the tokens of a chunk, tiles of memory, and products.

A sequence is cut into chunks of C tokens; the chunks of all sequences are numbered consecutively as slots.

Conditions are nested where `and` would be shorter: Triton 3.3 has no `and` of constants.

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
    sequence, row, first, end = place_chunk(slot, length, chunks, cu_seqlens, owners, C)
    tokens = first + tl.arange(0, C)
    return sequence, row, tokens, tokens < end


@triton.jit
def place_chunk(slot, length, chunks, cu_seqlens, owners, C: tl.constexpr):
    """Return the sequence of a slot, its row in memory, its first token, and the end of the sequence."""
    if cu_seqlens is not None:
        sequence = tl.load(owners + slot)
        begin = tl.load(cu_seqlens + sequence)
        end = tl.minimum(tl.load(cu_seqlens + sequence + 1), length)
        first = begin + (slot - begin // C - sequence) * C
        row = tl.zeros([], tl.int64)
    else:
        sequence = slot // chunks
        first = slot % chunks * C
        end = length
        row = sequence.to(tl.int64)
    return sequence, row, first, end


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
    tl.store(x + offsets, cast(values, x.dtype.element_ty), mask=row_exists[:, None] & column_exists[None, :])


@triton.jit
def cast(x, type: tl.constexpr):
    """Return fp32 numbers in another type, rounded to nearest."""
    if INTERPRETED:
        if type == tl.bfloat16:  # the interpreter cuts digits off
            x = _rounded(x, 16)
    return x.to(type)


@triton.jit
def short(x, like):
    """Return fp32 numbers rounded to bf16 if `like` is bf16; with fp16, `product` rounds them to tf32."""
    if like.dtype.element_ty == tl.bfloat16:
        if x.dtype == tl.float32:
            x = cast(x, tl.bfloat16)
    return x


@triton.jit
def product(a, b, total, PARTS: tl.constexpr = 3):
    """Return total + a @ b, summed in fp32 by the tensor cores, with factors rounded about as fp32 is.

    Two factors of 16 bits are multiplied as they are: their products are exact in fp32. If one factor is fp32
    and the other bf16, the fp32 factor is split into a sum of three bf16 numbers, which are multiplied one
    after the other. If the other is fp16, the fp32 factor is split into a sum of two tf32 numbers, as states
    and scores may be too large for fp16. Two factors in fp32 run as "tf32x3", which splits both into two tf32
    parts and loses 2^-22 of a term, where fp32 loses 2^-24 of the sum; "ieee" does not run on the tensor
    cores.

    Where the result is stored with 16 bits, PARTS = 1 is enough, since that part is rounded as the result is.
    PARTS = 2 is for terms that nearly cancel.
    """
    if a.dtype != tl.float32:
        if b.dtype != tl.float32:
            total = _dot(a, b, total)
        else:
            high, middle, low = _parts(b, a.dtype)
            if PARTS > 2:
                if a.dtype == tl.bfloat16:
                    total = _dot(a, low, total)
            if PARTS > 1:
                total = _dot(a, middle, total)
            total = _dot(a, high, total)
    elif b.dtype != tl.float32:
        high, middle, low = _parts(a, b.dtype)
        if PARTS > 2:
            if b.dtype == tl.bfloat16:
                total = _dot(low, b, total)
        if PARTS > 1:
            total = _dot(middle, b, total)
        total = _dot(high, b, total)
    elif PARTS == 1:
        total = tl.dot(_rounded(a, 13), _rounded(b, 13), total, input_precision="tf32")
    else:
        total = tl.dot(a, b, total, input_precision="tf32x3")
    return total


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 numbers as if they were integers
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif a.dtype == b.dtype:
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="tf32")
    return total


@triton.jit
def _parts(x, beside: tl.constexpr):
    """Return numbers whose sum is x, largest first: in bf16 for a product with bf16, else in tf32."""
    if beside == tl.bfloat16:
        high = cast(x, tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = cast(rest, tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    else:
        high = _rounded(x, 13)
        middle = _rounded(x - high, 13)
        low = x - high - middle
    return high, middle, low


@triton.jit
def _rounded(x, DIGITS: tl.constexpr):
    """Return fp32 numbers rounded to nearest, with DIGITS fewer binary digits; NaN stays NaN.

    Tensor cores themselves do not round to tf32, but cut digits off.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (DIGITS - 1)) - 1) + ((bits >> DIGITS) & 1)) & -(1 << DIGITS)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
