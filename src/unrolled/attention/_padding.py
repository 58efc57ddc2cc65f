"""Checking a padding mask and zeroing what it hides."""

from torch import Tensor

from unrolled.ops.checks import check_key_padding_mask
from unrolled.ops.masks import without_padding


def zero_padding(key_padding_mask: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """Return each `x [B,S,...]` with zeros where `key_padding_mask [B,S]` is True; None hides nothing."""
    if key_padding_mask is None:
        return xs
    check_key_padding_mask(key_padding_mask, *xs[0].shape[:2])
    return tuple(without_padding(x, key_padding_mask) for x in xs)
