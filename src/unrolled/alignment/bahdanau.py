r"""Additive attention: the state of a decoder attends to an encoded sentence through a hidden layer.

    e_t(s) = v_a . tanh(W_a h_t + U_a m_s)        w_t = softmax_s(e_t)        c_t = sum_s w_t(s) m_s

h_t is the query, in the paper the decoder's state before step t; m_s is the annotation of source word s.
U_a m_s is computed once for a sentence. Additive attention is also called concat attention, since
W_a h + U_a m is one matrix, W_a beside U_a, times the vector [h; m].

Bahdanau et al. 2014, "Neural Machine Translation by Jointly Learning to Align and Translate",
arXiv 1409.0473, section 3.1, eq. 5 and 6, and appendix A.1.2.

Cost, with K = attention_dim and a memory of S vectors M wide: time O(T S (K+M)), and S K tanh for each query;
memory O(T S), and in training O(T S K); per query time O(S (K+M)); state O(S (K+M)).
Cannot: be a layer of a decoder, since it does not attend within one sequence.
Equals softmax attention: never; its scores are not dot products.
"""

from typing import TypedDict

import torch
from torch import Tensor, nn

from unrolled.alignment.base import Alignment, MemoryState, additive_scores
from unrolled.ops.options import at_least


class AdditiveOptions(TypedDict, total=False):
    """Options of `BahdanauAttention`, for the mechanisms that derive from it."""

    attention_dim: int | None
    bias: bool


class BahdanauAttention(Alignment):
    """Additive attention, initialised as in the paper: W_a, U_a from N(0, 0.001^2), v_a and the bias 0.

    So all attention weights are equal at first.

    Args:
        query_dim, memory_dim: see `Alignment`.
        attention_dim: K, the width of the hidden layer that scores; `query_dim` by default.
        bias: give U_a a bias.

    Raises:
        ValueError: attention_dim below 1.
    """

    def __init__(
        self,
        query_dim: int,
        memory_dim: int | None = None,
        *,
        attention_dim: int | None = None,
        bias: bool = True,
    ):
        super().__init__(query_dim, memory_dim)
        width = query_dim if attention_dim is None else at_least(1, "attention_dim", attention_dim)
        self.query_proj = nn.Linear(query_dim, width, bias=False)
        self.key_proj = nn.Linear(self.memory_dim, width, bias=bias)
        self.v = nn.Parameter(torch.zeros(width))
        for layer in (self.query_proj, self.key_proj):
            nn.init.normal_(layer.weight, std=0.001)
        if bias:
            nn.init.zeros_(self.key_proj.bias)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Return U_a m."""
        return self.key_proj(memory)  # type: ignore[no-any-return]

    def project_query(self, query: Tensor) -> Tensor:
        """Return W_a h."""
        return self.query_proj(query)  # type: ignore[no-any-return]

    def scores(self, query: Tensor, state: MemoryState) -> Tensor:
        """Return e (eq. 6)."""
        return additive_scores(query, state.keys, self.v.to(query.dtype))
