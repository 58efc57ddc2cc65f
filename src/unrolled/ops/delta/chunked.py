r"""The delta rule in plain PyTorch, chunk by chunk.

In chunks of C tokens, with L the cumulative sum of log a within a chunk, D_ij = exp(L_i - L_j) for i >= j,
and S the state before the chunk, the C corrections of a chunk solve a triangular system:

    (I + tril(diag(b) K K^T * D, -1)) [U, W] = diag(b) [V, diag(e^L) K]
    N = U - W S        O = diag(e^L) Q S + (Q K^T * D) N        S' = e^(L_C) S + (diag(e^(L_C - L)) K)^T N

Yang, Wang, Zhang, Shen and Kim 2024 (arXiv 2406.06484), sections 3.2 and 3.3; with gates, Yang, Kautz and
Hatamizadeh 2024 (arXiv 2412.06464).

Time O(T (C (C+D+M) + D (D+M))) and memory O(T (C+D+M)) per head, with C = 32, or 64 for heads wider than 64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.chunks import join_chunks, split_chunks
from unrolled.ops.linear.chunked import LOWEST_GATE, decay_between
from unrolled.ops.precision import exact_dtype, without_autocast


class Inputs(NamedTuple):
    """The inputs of the delta rule."""

    q: Tensor  # [B,T,H,D]
    k: Tensor  # [B,T,G,D]
    v: Tensor  # [B,T,G,M]
    beta: Tensor  # [B,T,G]
    log_decay: Tensor | None  # [B,T,G]
    state: Tensor  # [B,G,D,M], in the accumulation dtype


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,H,M]` and the state `[B,G,D,M]` after the last token."""
    q, k, v, beta, log_decay, state = inputs
    (B, T, _, D), (G, M), dtype, exact = q.shape, v.shape[2:], state.dtype, exact_dtype(q.device)
    n = max(1, math.ceil(T / (32 if max(D, M) <= 64 else 64)))  # wider states are read less often
    C = max(1, math.ceil(T / n))
    with without_autocast(q.device):
        qs, ks, vs = (split_chunks(x.to(dtype), n, C, G) for x in (q, k, v))
        rates = split_chunks(beta.to(dtype).unsqueeze(-1), n, C, G)
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        if log_decay is None:
            within, from_start, to_end, through = lower.to(dtype), *[qs.new_ones(1)] * 3
        else:
            gates = log_decay.clamp(min=LOWEST_GATE).to(exact).unsqueeze(-1)
            L = split_chunks(gates, n, C, G).squeeze(-1).cumsum(-1)
            within = decay_between(L, L, lower, dtype)
            from_start, to_end, through = (
                x.to(dtype).exp().unsqueeze(-1) for x in (L, L[..., -1:] - L, L[..., -1:])
            )
        # The solver takes the diagonal as 1 and does not read above it. With similar keys and rates near 2
        # the solution alternates in sign; in fp32 it would lose digits that the token-by-token form keeps.
        keys, values = ks.to(exact), vs.to(exact)
        system = rates * (keys @ keys.mT) * within
        right_side = rates * torch.cat([values, from_start * keys], dim=-1)
        solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        U, W = solution.to(dtype).split([M, D], dim=-1)
        # S' = (e^(L_C) I - K'^T W) S + K'^T U, so the loop over the chunks has one product per chunk.
        kept = (through * torch.eye(D, dtype=dtype, device=q.device) - (to_end * ks).mT @ W).squeeze(2)
        written = ((to_end * ks).mT @ U).squeeze(2)
        states = [state.reshape(B * G, D, M)]
        for kept_c, written_c in zip(kept.unbind(1), written.unbind(1), strict=True):
            states.append(torch.baddbmm(written_c, kept_c, states[-1]))
        S = torch.stack(states[:-1], dim=1).unsqueeze(2)
        o = (from_start * qs) @ S + (qs @ ks.mT * within) @ (U - W @ S)
        return join_chunks(o, B, T, G).to(v.dtype), states[-1].reshape(B, G, D, M)


def step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each."""
    (B, H, D), (_, G, M), dtype = q.shape, v.shape, state.dtype
    with without_autocast(q.device):
        if log_decay is not None:
            state = state * log_decay.to(dtype).exp()[..., None, None]
        key = k.to(dtype).unsqueeze(-2)
        correction = beta.to(dtype)[..., None, None] * (v.to(dtype).unsqueeze(-2) - key @ state)
        state = state + key.mT * correction
        o = q.to(dtype).reshape(B, G, H // G, D) @ state
        return o.reshape(B, H, M).to(v.dtype), state
