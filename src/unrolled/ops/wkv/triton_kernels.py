# mypy: ignore-errors
# The bodies below are Triton's language, not Python: no type checker knows it.
"""Triton kernels of the weighted averages of RWKV-4: `scan` forwards, and `scan_back` for the gradients.

The formulas are those of `native/wkv.cc`. Both sums are kept times exp(-m - rest), where m is rounded, and
`rest` is what the rounding has lost. Of two weights that are added, the larger is exp(0), so the difference x
of their exponents gives both. A padded token has the weight exp(-inf) = 0, and nothing decays at it.

A program walks along the tokens of a sequence, for BC channels. The loads of STAGES tokens run ahead of the
sums. No two programs write to the same memory, so every run gives the same bits.
"""

import triton
import triton.language as tl

from unrolled.ops.triton.tiles import UNSPECIALIZED, cast, place_sequence


@triton.jit
def load_row(x, strides, row, token, c, inside):
    """Return some channels of a token as fp32, with zeros out of bounds."""
    offsets = row * strides[0] + token * strides[1] + c.to(tl.int64) * strides[2]
    return tl.load(x + offsets, mask=inside, other=0).to(tl.float32)


@triton.jit
def weigh(x):
    """Return exp(-max(0, x)), the weight of what is older, and exp(min(0, x)), that of what is newer."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x > 0, e, 1.0), tl.where(x > 0, 1.0, e)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan(
    k, k_strides, v, v_strides, log_decay, bonus, state, padding, o, after, kept, scales,
    length, cu_seqlens, channels, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Averages, and the state after a sequence, for `o` and `after`.

    For the gradients instead, what `scan_back` reads. `kept` [tokens, 4, channels] has both sums before each
    token, and the differences x in its average and in the sums after it. `scales` [sequences, channels] has
    the factors of the last sums that make them those times exp(-m).
    """
    sequence = tl.program_id(0)
    row, begin, end = place_sequence(sequence, length, cu_seqlens)
    first = tl.zeros([], tl.int64) + begin
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    d = tl.load(log_decay + c, mask=inside, other=0).to(tl.float32)
    u = tl.load(bonus + c, mask=inside, other=0).to(tl.float32)
    in_state = sequence.to(tl.int64) * 3 * channels + c
    num = tl.load(state + in_state, mask=inside, other=0)
    den = tl.load(state + in_state + channels, mask=inside, other=0)
    m = tl.load(state + in_state + 2 * channels, mask=inside, other=0)
    rest = tl.zeros([BC], tl.float32)
    for i in tl.range(0, end - begin, num_stages=STAGES):
        token = first + i
        at = row * length + token
        key = load_row(k, k_strides, row, token, c, inside)
        value = load_row(v, v_strides, row, token, c, inside)
        step = d + rest
        if padding is not None:
            padded = tl.load(padding + at)
            key, step = tl.where(padded, float("-inf"), key), tl.where(padded, rest, step)
        decayed = m + step
        lost = (m - decayed) + step
        own = (key - m) + (u - rest)
        later = (key - decayed) - lost
        if kept is None:
            older, newer = weigh(own)
            average = (older * num + newer * value) / (older * den + newer)
            if padding is not None:
                average = tl.where(padded, 0.0, average)
            tl.store(o + at * channels + c, cast(average, o.dtype.element_ty), mask=inside)
        else:
            in_kept = at * 4 * channels + c
            tl.store(kept + in_kept, num, mask=inside)
            tl.store(kept + in_kept + channels, den, mask=inside)
            tl.store(kept + in_kept + 2 * channels, own, mask=inside)
            tl.store(kept + in_kept + 3 * channels, later, mask=inside)
        older, newer = weigh(later)
        num = older * num + newer * value
        den = older * den + newer
        m, rest = tl.where(later > 0, key, decayed), tl.where(later > 0, 0.0, lost)
    scale = tl.exp(rest)
    if kept is None:
        tl.store(after + in_state, num * scale, mask=inside)
        tl.store(after + in_state + channels, den * scale, mask=inside)
        tl.store(after + in_state + 2 * channels, m, mask=inside)
    else:
        tl.store(scales + sequence.to(tl.int64) * channels + c, scale, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan_back(
    v, v_strides, grad_o, o_strides, grad_state, padding, kept, scales,
    dk, dv, d_log_decay, d_bonus, d_state,
    length, cu_seqlens, channels, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a sequence, from its last token to its first; `d_log_decay` and `d_bonus` are its parts.

    In these, m counts as a constant.
    """
    sequence = tl.program_id(0)
    row, begin, end = place_sequence(sequence, length, cu_seqlens)
    last = tl.zeros([], tl.int64) + end - 1
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    in_parts = sequence.to(tl.int64) * channels + c
    in_state = sequence.to(tl.int64) * 3 * channels + c
    scale = tl.load(scales + in_parts, mask=inside, other=0)
    d_num = tl.load(grad_state + in_state, mask=inside, other=0) * scale
    d_den = tl.load(grad_state + in_state + channels, mask=inside, other=0) * scale
    d_d, d_u = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
    for i in tl.range(0, end - begin, num_stages=STAGES):
        token = last - i
        at = row * length + token
        in_kept = at * 4 * channels + c
        num = tl.load(kept + in_kept, mask=inside, other=0)
        den = tl.load(kept + in_kept + channels, mask=inside, other=0)
        own = tl.load(kept + in_kept + 2 * channels, mask=inside, other=0)
        later = tl.load(kept + in_kept + 3 * channels, mask=inside, other=0)
        value = load_row(v, v_strides, row, token, c, inside)
        grad = load_row(grad_o, o_strides, row, token, c, inside)
        older, newer = weigh(own)
        share = 1 / (older * den + newer)
        if padding is not None:
            padded = tl.load(padding + at)
            share, grad = tl.where(padded, 0.0, share), tl.where(padded, 0.0, grad)
        average = (older * num + newer * value) * share
        grad *= share
        by_own, by_num = newer * grad, older * grad
        through = by_own * (value - average)
        d_u += through
        older, newer = weigh(later)
        d_value = by_own + newer * d_num
        d_key = through + newer * (d_num * value + d_den)
        tl.store(dv + at * channels + c, cast(d_value, dv.dtype.element_ty), mask=inside)
        tl.store(dk + at * channels + c, cast(d_key, dk.dtype.element_ty), mask=inside)
        d_num *= older
        d_den *= older
        by_decay = d_num * num + d_den * den
        if padding is not None:
            by_decay = tl.where(padded, 0.0, by_decay)
        d_d += by_decay
        d_num += by_num
        d_den -= by_num * average
    tl.store(d_state + in_state, d_num, mask=inside)
    tl.store(d_state + in_state + channels, d_den, mask=inside)
    tl.store(d_state + in_state + 2 * channels, tl.zeros([BC], tl.float32), mask=inside)
    tl.store(d_log_decay + in_parts, d_d, mask=inside)
    tl.store(d_bonus + in_parts, d_u, mask=inside)
