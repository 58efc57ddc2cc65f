"""Packed sequences: several of them laid end to end in one row, with int32 offsets `cu_seqlens [N+1]`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unrolled.ops.checks import check_key_padding_mask, check_offsets, shape


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Lay sequences `[L_n, ...]` end to end: `[1, sum L_n, ...]` and their offsets `cu_seqlens [N+1]`."""
    if not sequences:
        raise ValueError("sequences is empty, but pack needs at least one to know the width")
    lengths = torch.tensor([0, *map(len, sequences)], device=sequences[0].device)
    return torch.cat(list(sequences)).unsqueeze(0), lengths.cumsum(0, dtype=torch.int32)


def unpack(packed: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Cut `[1, T, ...]` back into the sequences that `pack` laid end to end."""
    return list(torch.split(packed[0], cu_seqlens.diff().tolist()))


def pack_padded(x: Tensor, key_padding_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Remove the padding (True) from `x [B,T,...]`: `[1, tokens, ...]` and `cu_seqlens [B+1]`."""
    if x.dim() < 2:
        raise ValueError(f"x has shape {shape(x)}, but must be [B, T, ...]")
    check_key_padding_mask(key_padding_mask, x.shape[0], x.shape[1])
    valid = ~key_padding_mask
    ends = valid.sum(1).cumsum(0, dtype=torch.int32)
    return x[valid].unsqueeze(0), torch.cat([ends.new_zeros(1), ends])


def pad_packed(packed: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Lay packed sequences side by side: `[N, longest, ...]`, zeros on the right, and its padding mask."""
    lengths = cu_seqlens.diff().long()
    longest = int(lengths.max()) if len(lengths) else 0
    place = torch.arange(longest, device=packed.device)
    padding = place >= lengths.unsqueeze(1)
    x = packed.new_zeros(len(lengths), longest, *packed.shape[2:])
    x[~padding] = packed[0]
    return x, padding


def valid_first(key_padding_mask: Tensor) -> Tensor:
    """Places of the valid tokens of each row in their order, then those of its padding (True): `[B,S]`."""
    return torch.argsort(key_padding_mask.byte(), dim=1, stable=True)


def reorder(x: Tensor, places: Tensor) -> Tensor:
    """y[b, i] = x[b, places[b, i]] for `x [B,S,...]` and `places [B,N]`, or with several axes for i.

    To undo a permutation, reorder by `places.argsort(1)`.
    """
    B, S = x.shape[:2]
    row = torch.arange(B, device=places.device).view(-1, *[1] * (places.dim() - 1))
    # One flat selection of rows: its backward pass is as fast as its forward pass, unlike that of
    # x[row, places].
    return x.flatten(0, 1).index_select(0, (row * S + places).flatten()).reshape(*places.shape, *x.shape[2:])


def valid_tokens_first(
    key_padding_mask: Tensor, *xs: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Callable[[Tensor], Tensor]]:
    """Close the gaps that padding (True) leaves in `x [B,S,...]`, so that distances count valid tokens only.

    Returns:
        each x with the valid tokens of each row first and zeros after them; their padding mask; and a
        function that restores the original order.
    """
    places = valid_first(key_padding_mask)
    padding = key_padding_mask.gather(1, places)
    back = places.argsort(1)
    masks = (padding.reshape(*padding.shape, *[1] * (x.dim() - 2)) for x in xs)
    first = tuple(reorder(x, places).masked_fill(mask, 0) for x, mask in zip(xs, masks, strict=True))
    return first, padding, lambda x: reorder(x, back)


def segment_ids(cu_seqlens: Tensor, total: int) -> Tensor:
    """Index of the sequence that each of the `total` packed tokens belongs to, `[total]`."""
    place = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)


def spans(cu_seqlens: Tensor | None, B: int, T: int) -> list[tuple[int, int, int]]:
    """List, for each sequence of a batch `[B,T]` or a pack, its row and where it begins and ends there."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    return [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]


def length_buckets(cu_seqlens: Tensor, total: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group packed sequences by length, so that each group padded to its longest wastes less than half.

    Yields, for each group of n sequences up to L long, their indices `[n]`, the packed position of each of
    their tokens `[n,L]` and the padding mask `[n,L]` (True = no such token; its position is 0).
    """
    offsets = cu_seqlens.tolist()
    check_offsets(offsets, total)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    buckets = [(b - a).bit_length() for a, b in pairwise(offsets)]
    bucket = torch.tensor(buckets, device=cu_seqlens.device)
    for size in sorted(set(buckets)):
        rows = (bucket == size).nonzero().squeeze(1)
        place = torch.arange(int(lengths[rows].max()), device=cu_seqlens.device)
        padding = place >= lengths[rows].unsqueeze(1)
        yield rows, (starts[rows].unsqueeze(1) + place).masked_fill(padding, 0), padding


def put_tokens(whole: Tensor, tokens: Tensor, padding: Tensor, part: Tensor) -> Tensor:
    """Replace the tokens of one group of `length_buckets` in `whole [1,T,...]` by those of `part [n,L,...]`.

    `whole` is not modified, since `torch.func.vmap` may map over `part` alone.
    """
    places = tokens[~padding]
    return whole.index_put((torch.zeros_like(places), places), part[~padding])
