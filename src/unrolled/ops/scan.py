"""A linear recurrence of numbers, computed in parallel."""

import torch
from torch import Tensor

from unrolled.ops.node import one_node


@one_node(lambda a, b: torch.empty_like(b))
def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    """x_t = a_t x_{t-1} + b_t along axis 1, from x_{-1} = 0; `a` broadcasts to `b`.

    Two steps combine into one step of the same kind: x_t = a_t a_{t-1} x_{t-2} + (a_t b_{t-1} + b_t). So the
    odd steps form a recurrence of half the length, and its results give the even steps. This takes O(T)
    operations in all, in 2 log2(T) parallel stages.
    """
    T = b.shape[1]
    if T < 2:
        return b
    a_odd = a[:, 1::2]
    odd = linear_scan(a_odd * a[:, : T - 1 : 2], a_odd * b[:, : T - 1 : 2] + b[:, 1::2])
    even = torch.cat([b[:, :1], a[:, 2::2] * odd[:, : (T - 1) // 2] + b[:, 2::2]], dim=1)
    both = torch.stack([even[:, : T // 2], odd], dim=2).flatten(1, 2)
    return torch.cat([both, even[:, T // 2 :]], dim=1)
