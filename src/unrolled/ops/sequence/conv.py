"""The short convolution over a sequence that processes share: its halo is the last inputs before a slice."""

from typing import Unpack

from torch import Tensor

from unrolled.contract import UnsupportedError
from unrolled.ops import conv
from unrolled.ops.conv import Options
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.sequence.ranks import current
from unrolled.ops.sequence.scan import scan
from unrolled.ops.sequence.summaries import Latest, last_tokens


def causal_conv(x: Tensor, weight: Tensor, **options: Unpack[Options]) -> tuple[Tensor, Tensor]:
    """Filter as `unrolled.ops.conv.causal_conv`, whose arguments these are, over the slices of all ranks.

    Returns:
        `y [B,T,C]` of this slice, and the state after the slices of all ranks. Without a given state, zeros
        take the place of that state, since only calls that continue from a state need it.

    Raises:
        UnsupportedError: `cu_seqlens` inside `sequence_parallel`.
    """
    if (ranks := current()) is None:
        return conv.causal_conv(x, weight, **options)
    if options.get("cu_seqlens") is not None:
        raise UnsupportedError("packed sequences cannot be cut into slices; use key_padding_mask instead")
    state, padding = options.get("state"), options.get("key_padding_mask")
    (B, T, C), W = x.shape, weight.shape[1]
    start = x.new_zeros(B, W - 1, C, dtype=accumulation_dtype(x.dtype, weight.dtype))
    given = {"recent": start if state is None else state}
    own, count = last_tokens(x, padding, min(W - 1, T))
    before, after = scan(ranks, given, Latest({"recent": own}, count), to_end=state is not None)
    options["state"] = before["recent"]
    y, _ = conv.causal_conv(x, weight, **options)
    return y, after.get("recent", start)
