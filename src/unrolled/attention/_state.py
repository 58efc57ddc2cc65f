"""Parts of recurrent states that several mechanisms share."""

from torch import Tensor

from unrolled.ops.linear import LinearState
from unrolled.ops.masks import without_padding


def position_after(position: Tensor, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Add the tokens of `x [B,T,...]` that are not padding to `position [B]`."""
    return position + (x.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(1))


def total_decay(log_decay: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Sum the log decays `[B,T,...]` of the tokens that are not padding."""
    if key_padding_mask is not None:
        log_decay = without_padding(log_decay, key_padding_mask)
    return log_decay.sum(1)


def without_denominator(kv: Tensor) -> LinearState:
    """Return `kv [B,G,D,M]` as the state that linear attention takes with `normalize=False`."""
    return LinearState(kv, kv.new_zeros(kv.shape[:3]))
