"""Masks of query-key pairs (True = attend) and of keys (True = padding)."""

import torch
from torch import Tensor

from unrolled.ops.checks import check_device, check_key_padding_mask, shape
from unrolled.ops.packing import segment_ids


def padding_mask(lengths: Tensor, longest: int | None = None) -> Tensor:
    """`key_padding_mask [B,S]` (True = padding) of rows of `lengths [B]` tokens, padded on the right."""
    if lengths.dim() != 1 or lengths.is_floating_point():
        raise ValueError(
            f"lengths has dtype {lengths.dtype} and shape {shape(lengths)}, but must be integers [B]"
        )
    S = int(lengths.max()) if longest is None and len(lengths) else longest or 0
    return torch.arange(S, device=lengths.device) >= lengths.unsqueeze(1)


def without_padding(x: Tensor, key_padding_mask: Tensor, nothing: float = 0.0) -> Tensor:
    """Set `x [B,S,...]` to `nothing` at padding (True).

    A weight of 0 for the padding would not be enough: 0 times an infinity in the padding is NaN.
    """
    check_device("key_padding_mask", key_padding_mask, x, "what it masks is")
    return x.masked_fill(key_padding_mask.reshape(*key_padding_mask.shape, *[1] * (x.dim() - 2)), nothing)


def zero_padding(key_padding_mask: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """Check the mask `[B,S]`, and return each `x [B,S,...]` with zeros at padding; None hides nothing."""
    if key_padding_mask is None:
        return xs
    check_key_padding_mask(key_padding_mask, *xs[0].shape[:2])
    return tuple(without_padding(x, key_padding_mask) for x in xs)


def any_padding(key_padding_mask: Tensor) -> Tensor | None:
    """Return the mask, or None if it marks no padding; while compiling, values are not known."""
    return key_padding_mask if torch.compiler.is_compiling() or key_padding_mask.any() else None


def causal_mask(T: int, S: int, device: torch.device | None = None) -> Tensor:
    """`[T,S]`: query i may attend to keys up to i + S - T, so the last query attends to the last key."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def packed_mask(cu_seqlens: Tensor, total: int) -> Tensor:
    """`[total,total]`: a token may attend to those of its own packed sequence."""
    segment = segment_ids(cu_seqlens, total)
    return segment.unsqueeze(1) == segment.unsqueeze(0)
