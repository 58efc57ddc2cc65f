"""Parts of one softmax, merged exactly.

The outputs of softmaxes over several sets of keys combine into that of one softmax over all:

    lse = log sum_p exp(lse_p)        o = sum_p exp(lse_p - lse) o_p

lse_p is the logarithm of the denominator of part p. A key in several parts counts once for each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def average_and_lse(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one part from `scores [...,T,S]`, minus infinity where masked, and `v [...,S,M]`.

    Returns:
        `o [...,T,M]` and `lse [...,T,1]`; 0 and minus infinity, with zero gradient, where all is masked.
    """
    top = scores.detach().amax(-1, keepdim=True)
    nothing = top == -torch.inf
    top = top.masked_fill(nothing, 0)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True).masked_fill(nothing, 1)
    o = (weights @ v / total).masked_fill(nothing, 0)
    return o, (top + total.log()).masked_fill(nothing, -torch.inf)


def merge_softmax(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge `o [...,M]` and `lse [...]` of each part into those of all.

    A part in which all keys of a query are masked has lse = minus infinity and is ignored. If that holds for
    all parts, o = 0 with zero gradient, and lse = minus infinity.
    """
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([lse for _, lse in parts])
    largest = lse.detach().amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0)  # inf - inf would be NaN
    shares = torch.where(lse == -torch.inf, 0, (lse - largest).masked_fill(lse == -torch.inf, 0).exp())
    total = shares.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    o = lse.new_zeros(())
    for share, (part, _) in zip(shares, parts, strict=True):
        o = o + (share / total).unsqueeze(-1) * part.to(lse.dtype)
    return o.to(parts[0][0].dtype), (total.log() + largest).masked_fill(empty, -torch.inf)
