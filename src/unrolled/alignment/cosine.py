r"""Cosine attention: attends by the cosine with a key, sharpened by a strength (the NTM's addressing).

    w_t = softmax_s(beta_t cos(k_t, m_s))        c_t = sum_s w_t(s) m_s
    k_t = W_k h_t + b_k        beta_t = log(1 + exp(w_b . h_t + b_b))

h_t is the query, m_s a vector of the memory; the cosine is that of eq. 6, with a small number added in each
norm.

Graves et al. 2014, "Neural Turing Machines", arXiv 1410.5401, section 3.3.1, eq. 5 and 6.

Cost, for a memory of S vectors M wide: time O(T S M), memory O(T S); per query time O(S M); state O(S M).
Cannot: distinguish vectors of one direction; be a layer of a decoder, since it does not attend within one
sequence.
Equals softmax attention: with scale beta_t, where keys and memory have the norm 1.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from unrolled.alignment.base import Alignment, MemoryState
from unrolled.ops.cosine import unit


class CosineAttention(Alignment):
    """Content addressing by keys and strengths, which linear layers compute from the queries.

    Args:
        query_dim, memory_dim: see `Alignment`.
    """

    def __init__(self, query_dim: int, memory_dim: int | None = None):
        super().__init__(query_dim, memory_dim)
        self.key_proj = nn.Linear(query_dim, self.memory_dim)
        self.strength_proj = nn.Linear(query_dim, 1)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Return unit vectors."""
        return unit(memory.to(self._state_dtype(memory)))

    def project_query(self, query: Tensor) -> Tensor:
        """Return k and, before its softplus, beta: `[B,T,memory_dim + 1]`."""
        return torch.cat([self.key_proj(query), self.strength_proj(query)], -1)

    def scores(self, query: Tensor, state: MemoryState) -> Tensor:
        """Return beta cos(k, m)."""
        key, strength = query[..., :-1], query[..., -1:]
        return softplus(strength) * (unit(key) @ state.keys.mT)
