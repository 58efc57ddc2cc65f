"""One part of a softmax over several sets of keys, for `unrolled.ops.merge.merge_softmax`."""

from torch import Tensor

from unrolled.ops.window import window_attention

Part = tuple[Tensor, Tensor]
"""The output `o [B,T,H,M]` and its log-sum-exp `lse [B,T,H]`."""


def attend_to_keys(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Part:
    """Attend from `q [B,T,H,D]` to all keys `k [B,S,G,D]`, `v [B,S,G,M]` except `padding [B,S]`."""
    return window_attention(q, k, v, window_size=(-1, -1), key_padding_mask=padding, return_lse=True)
