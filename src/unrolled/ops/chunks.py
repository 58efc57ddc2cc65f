"""Sequences cut into chunks, and the states between them: what the chunked forms of recurrences share.

`cut` is for any form. For the others, a chunked tensor is `[X,n,P,C,D]`: X = B*G key heads, n chunks, P = H/G
query heads that share a key head, C tokens to a chunk.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def cut(x: Tensor, C: int) -> Tensor:
    """[B,T,...] -> [B,n,C,...], with zeros after the last token."""
    end = x.new_zeros(x.shape[0], -x.shape[1] % C, *x.shape[2:])
    return torch.cat([x, end], 1).reshape(x.shape[0], -(-x.shape[1] // C), C, *x.shape[2:])


def split_chunks(x: Tensor, n: int, C: int, G: int) -> Tensor:
    """[B,T,H,D] -> [B*G,n,H/G,C,D], with zeros after the last token."""
    B, T, H, D = x.shape
    if n * C != T:
        x = pad(x, (0, 0, 0, 0, 0, n * C - T))
    return x.reshape(B, n, C, G, H // G, D).permute(0, 3, 1, 4, 2, 5).reshape(B * G, n, H // G, C, D)


def join_chunks(x: Tensor, B: int, T: int, G: int) -> Tensor:
    """[B*G,n,P,C,D] -> [B,T,G*P,D], the inverse of `split_chunks`."""
    _, n, P, C, D = x.shape
    return x.reshape(B, G, n, P, C, D).permute(0, 2, 4, 1, 3, 5).reshape(B, n * C, G * P, D)[:, :T]


def sum_heads(x: Tensor) -> Tensor:
    """Sum the contributions of the P query heads of a group to their common key head."""
    return x.sum(2, keepdim=True) if x.shape[2] > 1 else x


def scan(first: Tensor, additions: Tensor, through: Tensor | None) -> Tensor:
    """The n + 1 states s_0 = first, s_c+1 = through_c s_c + additions_c, along axis 1."""
    if through is None:
        return torch.cat([first, additions], dim=1).cumsum(1)
    states = [first]
    for c in range(additions.shape[1]):
        states.append(states[-1] * through[:, c : c + 1] + additions[:, c : c + 1])
    return torch.cat(states, dim=1)


def scan_back(last: Tensor, additions: Tensor, through: Tensor | None) -> Tensor:
    """The same from the other end: s_n = last, s_c = through_c s_c+1 + additions_c."""
    return scan(last, additions.flip(1), None if through is None else through.flip(1)).flip(1)
