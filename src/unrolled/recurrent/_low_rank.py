"""A matrix of low rank, U = A B^T, which is never materialised."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class LowRank(nn.Module):
    """x -> A (B^T x), with A `[rows,rank]` and B `[columns,rank]`.

    A and B are initialised uniformly, such that the entries of U have variance 1 / (3 columns), as in torch's
    recurrent matrices.

    Args:
        rows: length of the result.
        columns: length of x.
        rank: from 1 to `columns`.

    Raises:
        ValueError: a rank outside 1 .. `columns`.
    """

    def __init__(self, rows: int, columns: int, rank: int):
        super().__init__()
        if not 1 <= rank <= columns:
            raise ValueError(f"rank is {rank!r}, but must be an integer from 1 to hidden_size = {columns}")
        bound = (3 / (columns * rank)) ** 0.25  # rank * (bound^2 / 3)^2 = 1 / (3 columns)
        self.A = nn.Parameter(torch.empty(rows, rank).uniform_(-bound, bound))
        self.B = nn.Parameter(torch.empty(columns, rank).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[...,columns]` to `[...,rows]` in time O(rank (rows + columns)) per x, in the dtype of x."""
        return F.linear(x @ self.B.to(x.dtype), self.A.to(x.dtype))
