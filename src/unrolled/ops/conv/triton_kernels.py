# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of the causal convolution.

Forward: `outputs`, by chunks of C tokens and blocks of BC channels, and `states`, the last inputs.
Backward: `gradients_before_silu`, if there is silu; `input_gradients`, which also computes what each chunk
adds to the gradients of the taps; and `state_gradients`.

An input of a sequence is addressed by its place in memory. The W - 1 places before the first token stand for
the rows of the state. No two programs write to the same memory, so every run gives the same bits.
"""

import triton
import triton.language as tl

from unrolled.ops.triton.tiles import UNSPECIALIZED, load_tile, place, place_sequence, store_tile


@triton.jit
def inputs_at(x, strides, state, row, sequence, begin, at, exists, c, inside, channels, W: tl.constexpr):
    """Return the inputs at these places as fp32; those before the first token come from the state."""
    past = at < begin
    given = load_tile(x + row * strides[0], at, strides[1], exists & (at >= begin), c, strides[2], inside)
    state += sequence.to(tl.int64) * (W - 1) * channels
    before = load_tile(state, at - begin + (W - 1), channels, exists & past, c, 1, inside)
    return given.to(tl.float32) + before


@triton.jit
def gradients_at(
    grad_y, strides, grad_state, weight, w_strides, row, sequence, begin, end, at, exists, c, inside,
    channels, W: tl.constexpr,
):  # fmt: skip
    """Return the gradients of the inputs at these places, through the outputs and the last state."""
    grad_state += sequence.to(tl.int64) * (W - 1) * channels
    kept = at - end + (W - 1)
    total = load_tile(grad_state, kept, channels, exists & (kept >= 0), c, 1, inside)
    for tap in tl.static_range(W):
        reader = at + (W - 1 - tap)
        read = exists & (reader >= begin) & (reader < end)
        grad = load_tile(grad_y + row * strides[0], reader, strides[1], read, c, strides[2], inside)
        w = tl.load(weight + c.to(tl.int64) * w_strides[0] + tap * w_strides[1], mask=inside, other=0)
        total += w.to(tl.float32)[None, :] * grad.to(tl.float32)
    return total


@triton.jit
def filtered_at(
    x, x_strides, weight, w_strides, bias, state, row, sequence, begin, tokens, exists, c, inside, channels,
    W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Return the outputs before silu at the tokens of a chunk as fp32."""
    total = tl.zeros([C, BC], tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=inside, other=0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        at = tokens + (tap - W + 1)
        given = inputs_at(x, x_strides, state, row, sequence, begin, at, exists, c, inside, channels, W)
        w = tl.load(weight + c.to(tl.int64) * w_strides[0] + tap * w_strides[1], mask=inside, other=0)
        total += w.to(tl.float32)[None, :] * given
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def outputs(
    x, x_strides, weight, w_strides, bias, state, y, length, chunks, cu_seqlens, owners, channels,
    SILU: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk."""
    sequence, row, tokens, exists = place(tl.program_id(0), length, chunks, cu_seqlens, owners, C)
    _, begin, _ = place_sequence(sequence, length, cu_seqlens)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    z = filtered_at(
        x, x_strides, weight, w_strides, bias, state, row, sequence, begin, tokens, exists, c, inside,
        channels, W, C, BC,
    )  # fmt: skip
    if SILU:
        z *= tl.sigmoid(z)
    store_tile(y, row * length + tokens, channels, exists, c, inside, z)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradients_before_silu(
    x, x_strides, weight, w_strides, bias, state, grad_y, y_strides, grad_z, length, chunks, cu_seqlens,
    owners, channels, W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of the outputs of a chunk before silu, which are computed anew."""
    sequence, row, tokens, exists = place(tl.program_id(0), length, chunks, cu_seqlens, owners, C)
    _, begin, _ = place_sequence(sequence, length, cu_seqlens)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    z = filtered_at(
        x, x_strides, weight, w_strides, bias, state, row, sequence, begin, tokens, exists, c, inside,
        channels, W, C, BC,
    )  # fmt: skip
    grad = load_tile(grad_y + row * y_strides[0], tokens, y_strides[1], exists, c, y_strides[2], inside)
    s = tl.sigmoid(z)
    grad_before = grad.to(tl.float32) * s * (1 + z * (1 - s))
    store_tile(grad_z, row * length + tokens, channels, exists, c, inside, grad_before)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def states(
    x, x_strides, state, after, length, cu_seqlens, channels,
    W: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The last W - 1 inputs of a sequence; ROWS is a power of two that covers W - 1."""
    sequence = tl.program_id(0)
    row, begin, end = place_sequence(sequence, length, cu_seqlens)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    i = tl.arange(0, ROWS)
    exists, at = i < W - 1, end - (W - 1) + i
    given = inputs_at(x, x_strides, state, row, sequence, begin, at, exists, c, c < channels, channels, W)
    rows = sequence.to(tl.int64) * (W - 1) + i
    store_tile(after, rows, channels, exists, c, c < channels, given)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def input_gradients(
    x, x_strides, weight, w_strides, state, grad_y, y_strides, grad_state, dx, d_taps,
    length, chunks, cu_seqlens, owners, channels,
    W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk of inputs, and its part of the gradients of the taps, [slots, W, channels]."""
    slot = tl.program_id(0)
    sequence, row, tokens, exists = place(slot, length, chunks, cu_seqlens, owners, C)
    _, begin, end = place_sequence(sequence, length, cu_seqlens)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    total = gradients_at(
        grad_y, y_strides, grad_state, weight, w_strides, row, sequence, begin, end, tokens, exists, c,
        inside, channels, W,
    )  # fmt: skip
    store_tile(dx, row * length + tokens, channels, exists, c, inside, total)
    grad = load_tile(grad_y + row * y_strides[0], tokens, y_strides[1], exists, c, y_strides[2], inside)
    for tap in tl.static_range(W):
        at = tokens + (tap - W + 1)
        given = inputs_at(x, x_strides, state, row, sequence, begin, at, exists, c, inside, channels, W)
        added = tl.sum(given * grad.to(tl.float32), 0)
        tl.store(d_taps + (slot.to(tl.int64) * W + tap) * channels + c, added, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def state_gradients(
    weight, w_strides, grad_y, y_strides, grad_state, d_state, length, cu_seqlens, channels,
    W: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of the state before a sequence; ROWS is a power of two that covers its W - 1 rows."""
    sequence = tl.program_id(0)
    row, begin, end = place_sequence(sequence, length, cu_seqlens)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    i = tl.arange(0, ROWS)
    exists = i < W - 1
    total = gradients_at(
        grad_y, y_strides, grad_state, weight, w_strides, row, sequence, begin, end, begin - (W - 1) + i,
        exists, c, c < channels, channels, W,
    )  # fmt: skip
    rows = sequence.to(tl.int64) * (W - 1) + i
    store_tile(d_state, rows, channels, exists, c, c < channels, total)
