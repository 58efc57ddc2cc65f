r"""The delta rule in plain PyTorch, chunk by chunk.

In chunks of C tokens, with L the cumulative sum of log a within a chunk, D_ij = exp(L_i - L_j) for i >= j,
and S the state before the chunk, the C corrections of a chunk solve a triangular system:

    (I + tril(diag(b) K K^T * D, -1)) [U, W] = diag(b) [V, diag(e^L) K]
    N = U - W S        O = diag(e^L) Q S + (Q K^T * D) N        S' = e^(L_C) S + (diag(e^(L_C - L)) K)^T N

With a gate for every feature of the keys, L [C,D] holds a sum for each feature. The products over the
features c are computed as in gated linear attention (`ops.gla.chunked`), so that no exponent is positive:

    (K K^T * D)_ij = sum_c k_ic k_jc exp(L_ic - L_jc)        e^L * K and e^(L_C - L) * K, elementwise

Yang, Wang, Zhang, Shen and Kim 2024 (arXiv 2406.06484), sections 3.2 and 3.3; with gates, Yang, Kautz and
Hatamizadeh 2024 (arXiv 2412.06464); with a gate for every feature, Kimi Team 2025 (arXiv 2510.26692).

Time O(T (C (C+D+M) + D (D+M))) and memory O(T (C+D+M)) per head, with C = 32, or 64 for heads wider than 64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.chunks import join_chunks, split_chunks
from unrolled.ops.gla import chunked as gla
from unrolled.ops.linear.chunked import LOWEST_GATE, decay_between
from unrolled.ops.precision import exact_dtype, without_autocast


class Inputs(NamedTuple):
    """The inputs of the delta rule."""

    q: Tensor  # [B,T,H,D]
    k: Tensor  # [B,T,G,D]
    v: Tensor  # [B,T,G,M]
    beta: Tensor  # [B,T,G]
    log_decay: Tensor | None  # [B,T,G], or [B,T,G,D] for a gate of every feature
    state: Tensor  # [B,G,D,M], in the accumulation dtype

    @property
    def by_feature(self) -> bool:
        """Whether every feature of the keys has a gate."""
        return self.log_decay is not None and self.log_decay.dim() == 4


class Chunks(NamedTuple):
    """Products of the queries, keys and gates of the chunks; see `ops.chunks` for the letters."""

    key_products: Tensor  # K K^T * D [X,n,1,C,C]; only the part below the diagonal is read
    query_products: Tensor  # tril(Q K^T * D) [X,n,P,C,C]
    from_start: Tensor  # e^L [X,n,1,C,D]; here and below, 1 in place of D if all features share a gate
    to_end: Tensor  # e^(L_C - L)
    through: Tensor  # e^(L_C) [X,n,1,D,1]


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,H,M]` and the state `[B,G,D,M]` after the last token."""
    q, k, v, beta, log_decay, state = inputs
    (B, T, _, D), (G, M), dtype, exact = q.shape, v.shape[2:], state.dtype, exact_dtype(q.device)
    n, C = _chunk_sizes(inputs)
    with without_autocast(q.device):
        qs, ks, vs = (split_chunks(x.to(dtype), n, C, G) for x in (q, k, v))
        rates = split_chunks(beta.to(dtype).unsqueeze(-1), n, C, G)
        if log_decay is None:
            x = _no_gates(qs, ks)
        else:
            gates = log_decay.clamp(min=LOWEST_GATE).to(exact)
            gates = split_chunks(gates if inputs.by_feature else gates.unsqueeze(-1), n, C, G)
            x = (_gates_by_feature if inputs.by_feature else _gates_by_head)(qs, ks, gates)
        # The solver takes the diagonal as 1 and does not read above it. With similar keys and rates near 2,
        # the solution alternates in sign and would lose digits in fp32 that the token-by-token form keeps.
        right_side = rates * torch.cat([vs.to(exact), x.from_start * ks.to(exact)], dim=-1)
        system = rates * x.key_products
        solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        U, W = solution.to(dtype).split([M, D], dim=-1)
        # S' = (e^(L_C) I - K'^T W) S + K'^T U, so the loop over the chunks has one product per chunk.
        k_to_end = (x.to_end * ks).mT
        kept = (x.through * torch.eye(D, dtype=dtype, device=q.device) - k_to_end @ W).squeeze(2)
        written = (k_to_end @ U).squeeze(2)
        states = [state.reshape(B * G, D, M)]
        for kept_c, written_c in zip(kept.unbind(1), written.unbind(1), strict=True):
            states.append(torch.baddbmm(written_c, kept_c, states[-1]))
        S = torch.stack(states[:-1], dim=1).unsqueeze(2)
        o = (x.from_start * qs) @ S + x.query_products @ (U - W @ S)
        return join_chunks(o, B, T, G).to(v.dtype), states[-1].reshape(B, G, D, M)


def _chunk_sizes(inputs: Inputs) -> tuple[int, int]:
    """Number of chunks, and number of tokens in each."""
    T = inputs.q.shape[1]
    longest = 32 if max(inputs.state.shape[2:]) <= 64 else 64  # longer chunks read a wide state less often
    if inputs.by_feature:
        return gla.chunk_sizes(T, longest)
    n = max(1, math.ceil(T / longest))
    return n, max(1, math.ceil(T / n))


def _no_gates(q: Tensor, k: Tensor) -> Chunks:
    keys, ones = k.to(exact_dtype(k.device)), k.new_ones(1)
    return Chunks(keys @ keys.mT, (q @ k.mT).tril(), ones, ones, ones)


def _gates_by_head(q: Tensor, k: Tensor, log_decay: Tensor) -> Chunks:
    """Compute the chunks for gates `[X,n,1,C,1]`, one for all features."""
    L, keys = log_decay.squeeze(-1).cumsum(-1), k.to(log_decay.dtype)
    lower = torch.ones(L.shape[-1], L.shape[-1], dtype=torch.bool, device=L.device).tril()
    within = decay_between(L, L, lower, k.dtype)
    decays = (x.to(k.dtype).exp().unsqueeze(-1) for x in (L, L[..., -1:] - L, L[..., -1:]))
    return Chunks(keys @ keys.mT * within, q @ k.mT * within, *decays)


def _gates_by_feature(q: Tensor, k: Tensor, log_decay: Tensor) -> Chunks:
    """Compute the chunks for gates `[X,n,1,C,D]`, by the products of `gla.chunked`."""
    decay, keys = log_decay.exp(), k.to(log_decay.dtype)
    key_products, _, _ = gla.products(keys, keys, gla.cuts_of(decay))
    query_products, from_start, to_end = gla.products(q, k, gla.cuts_of(decay.to(k.dtype)))
    return Chunks(key_products, query_products, from_start, to_end, from_start[..., -1:, :].mT)


def step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each."""
    (B, H, D), (_, G, M), dtype = q.shape, v.shape, state.dtype
    with without_autocast(q.device):
        if log_decay is not None:
            gate = log_decay.to(dtype).exp()
            state = state * (gate.unsqueeze(-1) if gate.dim() == 3 else gate[..., None, None])
        key = k.to(dtype).unsqueeze(-2)
        correction = beta.to(dtype)[..., None, None] * (v.to(dtype).unsqueeze(-2) - key @ state)
        state = state + key.mT * correction
        o = q.to(dtype).reshape(B, G, H // G, D) @ state
        return o.reshape(B, H, M).to(v.dtype), state
