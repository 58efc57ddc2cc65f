r"""Window attention with gaps: a query reads every d-th key near it, and each head has its own d.

    W_i = { i + m d : -left <= m <= right }

so a window of left + right + 1 keys spans d times as many tokens. Tokens of different i mod d never interact.
So the sequence consists of d interleaved sequences, its residue classes, and `window_attention` runs on each.

Beltagy et al. 2020, "Longformer" (arXiv 2004.05150), section 3.1.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from unrolled.ops.checks import check_qkv
from unrolled.ops.chunks import cut
from unrolled.ops.node import like_attention_and_lse, one_node
from unrolled.ops.packing import segment_ids
from unrolled.ops.positions import positions_from_cu_seqlens
from unrolled.ops.window import window_attention
from unrolled.ops.window.blocks import Inputs


class Run(NamedTuple):
    """Neighbouring query heads of one dilation, and the key heads that they read in equal parts."""

    dilation: int
    heads: slice
    kv_heads: slice | list[int]


def runs(dilation: Sequence[int], n_kv_heads: int) -> Iterator[Run]:
    """Cut the query heads where the dilation changes; key heads in two runs are read twice."""
    share, end = len(dilation) // n_kv_heads, 0
    for d, alike in groupby(dilation):
        begin, end = end, end + len(list(alike))
        if begin % share == 0 and end % share == 0:
            yield Run(d, slice(begin, end), slice(begin // share, end // share))
        else:
            yield Run(d, slice(begin, end), [head // share for head in range(begin, end)])


def dilated_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: tuple[int, int],
    dilation: Sequence[int],
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to a window with gaps (equation above): `o [B,T,H,M]` and `lse [B,T,H]`.

    Args:
        q, k, v, key_padding_mask, cu_seqlens: as for `window_attention`; a padded key keeps its position. The
            number of keys before the first query, S - T, must be 0 or at least left d.
        window_size: `(left, right)`, numbers of keys, both bounded.
        dilation: d of each of the H query heads.

    Raises:
        ValueError: an argument of the wrong shape or type; decreasing offsets.
    """
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    parts = []
    for d, heads, kv_heads in runs(dilation, k.shape[2]):
        inputs = Inputs(q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads], key_padding_mask)
        parts.append(_of_one_dilation(inputs, window_size, d, cu_seqlens))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def window_pattern(length: int, window_size: tuple[int, int], dilation: Sequence[int]) -> Tensor:
    """Which keys each query of a sequence reads: `[H,length,length]`, int64, 1 or 0."""
    place = torch.arange(length)
    ahead = place - place.unsqueeze(1)
    d = torch.tensor(dilation)[:, None, None]
    left, right = window_size
    return ((ahead % d == 0) & (ahead >= -left * d) & (ahead <= right * d)).long()


def _of_one_dilation(
    inputs: Inputs, window_size: tuple[int, int], d: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v, padding = inputs
    if d > 1 and cu_seqlens is None:
        return dilated_window(q, k, v, window_size, d, padding)
    if d > 1 and cu_seqlens is not None:
        return _packed(inputs, window_size, d, cu_seqlens)
    return window_attention(
        q, k, v, window_size=window_size, key_padding_mask=padding, cu_seqlens=cu_seqlens, return_lse=True
    )


@one_node(like_attention_and_lse)
def dilated_window(
    q: Tensor, k: Tensor, v: Tensor, window_size: Sequence[int], d: int, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `dilated_window_attention` for one dilation above 1 and checked arguments."""
    B, T, S = *q.shape[:2], k.shape[1]
    left, right = window_size
    unread = max(0, S - T - left * d)  # the number of keys left before the first query is a multiple of d
    k, v = k[:, unread:], v[:, unread:]
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, unread:]
    elif right and T % d:
        key_padding_mask = torch.zeros(B, S - unread, dtype=torch.bool, device=q.device)
    if key_padding_mask is not None:
        key_padding_mask = ~_classes(~key_padding_mask, d)
    classes = (_classes(x, d) for x in (q, k, v))
    o, lse = window_attention(
        *classes, window_size=(left, right), key_padding_mask=key_padding_mask, return_lse=True
    )
    return _interleaved(o, B, d)[:, :T], _interleaved(lse, B, d)[:, :T]


def _packed(
    inputs: Inputs, window_size: tuple[int, int], d: int, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Make each residue class of each packed sequence a packed sequence of its own."""
    q, k, v, key_padding_mask = inputs
    T, n_classes = q.shape[1], (len(cu_seqlens) - 1) * d
    of_token = segment_ids(cu_seqlens, T) * d + positions_from_cu_seqlens(cu_seqlens, T)[0] % d
    sizes = torch.zeros(n_classes, dtype=torch.int32, device=q.device)
    sizes = sizes.scatter_add(0, of_token, torch.ones_like(of_token, dtype=torch.int32))
    order = of_token.argsort(stable=True)
    offsets = F.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    padding = None if key_padding_mask is None else key_padding_mask[:, order]
    q, k, v = (x[:, order] for x in (q, k, v))
    o, lse = window_attention(
        q, k, v, window_size=window_size, key_padding_mask=padding, cu_seqlens=offsets, return_lse=True
    )
    back = order.argsort()
    return o[:, back], lse[:, back]


def _classes(x: Tensor, d: int) -> Tensor:
    """[B,T,...] -> [B*d,ceil(T/d),...]: token i to row i mod d, with zeros where one row is shorter."""
    return cut(x, d).transpose(1, 2).flatten(0, 1)


def _interleaved(x: Tensor, B: int, d: int) -> Tensor:
    """Undo `_classes`, but keep the zeros."""
    n, rest = x.shape[1], x.shape[2:]
    return x.reshape(B, d, n, *rest).transpose(1, 2).reshape(B, n * d, *rest)
