"""Counting the tokens of a recurrent state."""

from torch import Tensor


def advance(position: Tensor, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Add the tokens of `x [B,T,...]` that are not padding to `position [B]`."""
    return position + (x.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(1))
