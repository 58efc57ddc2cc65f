r"""The rule of a diagonal plus low rank, chunk by chunk in plain PyTorch.

The gates of the channels are applied as in gated linear attention (`ops.gla.chunked`): with L the cumulative
log w of a chunk of C tokens, and P(x, y)_ij = sum_c x_ic y_jc exp(L_ic - L_jc) for i >= j, no exponent is
positive. The state that a_t reads has passed the gates up to t - 1 only. So row t of P'(A, y) has the decays
of token t - 1. With S the state before the chunk, the reads U of the chunk solve a triangular system:

    (I - P'(A, B)) U = P'(A, K) V + (e^(L') * A) S        L'_t = L_t-1
    O = (e^L * Q) S + P(Q, B) U + P(Q, K) V
    S' = diag(e^(L_C)) S + (e^(L_C - L) * B)^T U + (e^(L_C - L) * K)^T V

Time O(T (C (C+D+M) + D (D+M))) and memory O(T (C+D+M)) per head, with C = 32, or 64 for heads wider than 64.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.ops.chunks import join_chunks, split_chunks
from unrolled.ops.gla import chunked as gla
from unrolled.ops.linear.chunked import LOWEST_GATE
from unrolled.ops.precision import exact_dtype, without_autocast


class Inputs(NamedTuple):
    """The inputs of the rule, of H heads."""

    q: Tensor  # [B,T,H,D]
    k: Tensor  # [B,T,H,D]
    v: Tensor  # [B,T,H,M]
    a: Tensor  # [B,T,H,D]
    b: Tensor  # [B,T,H,D]
    log_decay: Tensor  # [B,T,H,D]
    state: Tensor  # [B,H,D,M], in the accumulation dtype


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,H,M]` and the state `[B,H,D,M]` after the last token."""
    *tokenwise, state = inputs
    (B, T, H, D), M, dtype = inputs.q.shape, inputs.v.shape[3], state.dtype
    exact = exact_dtype(state.device)
    n, C = gla.chunk_sizes(T, 32 if max(D, M) <= 64 else 64)  # longer chunks read a wide state less often
    with without_autocast(state.device):
        q, k, v, a, b, log_decay = (split_chunks(x.to(dtype), n, C, H) for x in tokenwise)
        decay = log_decay.clamp(min=LOWEST_GATE).exp()
        query_writes, from_start, to_end = gla.products(q, b, gla.cuts_of(decay))
        query_keys, _, _ = gla.products(q, k, gla.cuts_of(decay))
        # a_t reads the state after token t - 1, so its products are those of row t - 1.
        ahead = pad(a[..., 1:, :], (0, 0, 0, 1))
        read_keys, _, _ = gla.products(ahead, k, gla.cuts_of(decay))
        # The solver takes the diagonal as 1 and does not read above it.
        wide = decay.to(exact)
        read_writes, _, _ = gla.products(ahead.to(exact), b.to(exact), gla.cuts_of(wide))
        begun = pad(from_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
        right_side = torch.cat([_next_row(read_keys) @ v, begun * a], dim=-1).to(exact)
        solution = torch.linalg.solve_triangular(
            -_next_row(read_writes), right_side, upper=False, unitriangular=True
        )
        read, through = solution.to(dtype).split([M, D], dim=-1)  # U = read + through S
        b_to_end = (to_end * b).mT
        kept = torch.diag_embed(from_start[..., -1, :]) + b_to_end @ through
        written = b_to_end @ read + (to_end * k).mT @ v
        states = [state.reshape(B * H, 1, 1, D, M)]
        for kept_c, written_c in zip(kept.split(1, 1), written.split(1, 1), strict=True):
            states.append(written_c + kept_c @ states[-1])
        S = torch.cat(states[:-1], dim=1)
        o = (from_start * q) @ S + query_writes @ (read + through @ S) + query_keys @ v
        return join_chunks(o, B, T, H).to(inputs.v.dtype), states[-1].reshape(B, H, D, M)


def _next_row(products: Tensor) -> Tensor:
    """Move every row down by one: the first token of a chunk reads no other token of it."""
    return pad(products[..., :-1, :], (0, 0, 1, 0))


def step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each."""
    dtype = state.dtype
    with without_autocast(state.device):
        q, k, value, a, b = (x.to(dtype).unsqueeze(-2) for x in (q, k, v, a, b))
        state = log_decay.to(dtype).exp().unsqueeze(-1) * state + b.mT * (a @ state) + k.mT * value
        return (q @ state).squeeze(-2).to(v.dtype), state
