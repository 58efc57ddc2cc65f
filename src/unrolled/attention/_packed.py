"""Packed sequences for mechanisms that honour padding: sequences of similar length become padded batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unrolled.attention.base import Heads, Inputs, Masks
from unrolled.ops.packing import length_buckets, put_tokens


def attend_packed(
    attend: Callable[[Heads[Inputs], Masks], Tensor], heads: Heads[Inputs], cu_seqlens: Tensor
) -> Tensor:
    """Attend in each packed sequence by itself: `[1,T,H,M]`.

    Each sequence is padded on the right to less than twice its length. Reading the offsets synchronises with
    a GPU.

    Args:
        attend: attends in a batch with a `key_padding_mask`.
        heads: queries, keys and values of one row; the tensors in `heads.inputs` must have one row too.
        cu_seqlens: int32 `[N+1]` offsets.
    """
    (_, T, H, _), M = heads.q.shape, heads.v.shape[3]
    if T == 0:
        return attend(heads, Masks())
    o = heads.v.new_zeros(1, T, H, M)
    for _, tokens, padding in length_buckets(cu_seqlens, T):
        part = Heads(*(_rows(x, tokens) for x in heads[:5]))
        o = put_tokens(o, tokens, padding, attend(part, Masks(key_padding_mask=padding)).to(o.dtype))
    return o


def _rows(x: Any, tokens: Tensor) -> Any:
    """Return the tokens `[n,L]` of `x [1,T,...]`, or of each tensor in a nested tuple."""
    if isinstance(x, tuple):
        return type(x)(*(_rows(y, tokens) for y in x))
    return x[0, tokens] if isinstance(x, torch.Tensor) else x
