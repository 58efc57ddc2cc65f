"""Suffixes of token sequences, and the tokens that would repeat an n-gram."""

from collections.abc import Sequence

import torch
from torch import Tensor


def end_with(tokens: Tensor, ids: Sequence[int]) -> Tensor:
    """Whether each of `tokens [n,K,L]` ends with `ids`: `[n,K]`."""
    n, K, L = tokens.shape
    if len(ids) > L:
        return torch.zeros(n, K, dtype=torch.bool, device=tokens.device)
    return (tokens[..., L - len(ids) :] == torch.tensor(ids, device=tokens.device)).all(-1)


def repeated(tokens: Tensor, size: int, vocab_size: int) -> Tensor:
    """Which next tokens would repeat an n-gram of this size in `tokens [n,K,L]`: `[n,K,vocab_size]`."""
    n, K, L = tokens.shape
    found = torch.zeros(n, K, vocab_size + 1, dtype=torch.bool, device=tokens.device)  # the last: no token
    if size <= L:
        grams = tokens.unfold(2, size, 1)  # [n,K,L-size+1,size]
        begun = (grams[..., :-1] == tokens[..., None, L - size + 1 :]).all(-1)
        found.scatter_(2, grams[..., -1].where(begun, vocab_size), True)
    return found[..., :vocab_size]
