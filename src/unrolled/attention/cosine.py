r"""Cosine attention: reads a memory by the angle to a key, sharpened by a strength (the NTM's addressing).

    w_t = softmax_s(beta_t cos(k_t, m_s))        c_t = sum_s w_t(s) m_s
    k_t = W_k h_t + b_k        beta_t = log(1 + exp(w_b . h_t + b_b))

h_t is the query, m_s a vector of the memory; the cosine is that of eq. 6 with a small number in each norm.

Graves et al. 2014, "Neural Turing Machines", arXiv 1410.5401, section 3.3.1, eq. 5 and 6.

Cost, with memory S vectors of M: time O(T S M), memory O(T S); per query time O(S M), state O(S M), fixed.
Cannot: tell apart vectors that point the same way; read a sequence by itself, so it is no layer of a decoder.
Equals softmax attention: with scale beta_t, where keys and memory have the norm 1.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from unrolled.attention._memory import MemoryAttention, MemoryState, softmax_inside

EPSILON = 1e-8
"""Added to squared norms, so that the cosine of a vector of zeros is 0, with finite gradients."""


def cosine_weights(
    key: Tensor,
    memory: Tensor,
    beta: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """w = softmax_s(beta cos(key, memory_s)) (eq. 5 and 6).

    Args:
        key: `[B,...,W]`, any number of keys for each memory.
        memory: `[B,N,W]`.
        beta: strengths `[B,...]`.
        key_padding_mask: `[B,N]`, True = padding, which gets no weight.
        epsilon: added to the squared norms.

    Returns:
        weights `[B,...,N]` that add up to 1; 0 in rows of nothing but padding.
    """
    if key_padding_mask is not None:
        memory = memory.masked_fill(key_padding_mask.unsqueeze(-1), 0)
    keys = unit(key, epsilon).flatten(1, -2) if key.dim() > 2 else unit(key, epsilon).unsqueeze(1)
    cosine = (keys @ unit(memory, epsilon).mT).reshape(*key.shape[:-1], memory.shape[1])
    scores = beta.unsqueeze(-1) * cosine
    if key_padding_mask is None:
        return scores.softmax(-1)
    allowed = ~key_padding_mask.reshape(len(memory), *[1] * (key.dim() - 2), -1)
    return softmax_inside(scores, allowed)


def unit(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """x / sqrt(|x|^2 + epsilon) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon)


class CosineAttention(MemoryAttention):
    """Content addressing by keys and strengths that linear layers make of the queries.

    Args:
        query_dim, memory_dim: see `MemoryAttention`.
    """

    def __init__(self, query_dim: int, memory_dim: int | None = None):
        super().__init__(query_dim, memory_dim)
        self.key_proj = nn.Linear(query_dim, self.memory_dim)
        self.strength_proj = nn.Linear(query_dim, 1)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Unit vectors."""
        return unit(memory.to(self._state_dtype(memory)))

    def project_query(self, query: Tensor) -> Tensor:
        """k and, before its softplus, beta: `[B,T,memory_dim + 1]`."""
        return torch.cat([self.key_proj(query), self.strength_proj(query)], -1)

    def scores(self, query: Tensor, state: MemoryState) -> Tensor:
        """Beta cos(k, m)."""
        key, strength = query[..., :-1], query[..., -1:]
        return softplus(strength) * (unit(key) @ state.keys.mT)
