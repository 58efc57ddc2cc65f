r"""Sparse Transformer attention: two sets of about sqrt(n) keys each, which reach every key in two hops.

With the stride l, query i of causal attention reads keys j <= i of

                 near                             far
    strided      i - j <= w                       (i - j) mod l = 0
    fixed        floor(j / l) = floor(i / l)      j mod l among the last c places, or j = i

The fixed pattern cuts the sequence into blocks of l, whose last c tokens summarise them for later blocks.
With u sub-blocks, head h instead reads the c places that end at l - (h mod u) c. Such a head alone does not
reach the later places of a block in two hops; heads that read the last c places do. Bidirectional attention
reads ahead as it reads back. A head that reads both sets reads their union by one softmax, each key once.

Child, Gray, Radford and Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
arXiv 1904.10509, sections 4.2, 4.3 and 5.1. In the paper w is l, in the authors' code l - 1. In the paper's
fixed pattern, early queries have no far keys, so a head that reads far keys only would read nothing. Here
each query also reads itself.

Cost per head: memory is that of inputs and outputs. Strided: time O(T (w + T / l) (D + M)); per generated
token time O((w + T / l) (D + M)), state O(T (D + M)). Fixed: time O(T (l + T c / l) (D + M)); per generated
token time and state O((l + T c u / l) (D + M)). A prefill that continues a state costs as much as one of the
whole sequence.
Cannot: read another sequence, or honour an arbitrary `attn_mask`. The strided pattern suits periodic
data, such as the rows of an image, and fails on text.
Equals softmax attention: where both sets are read, at l = 1, at l >= n and, fixed, at c = l.

With `rotary`, queries and keys are rotated by their positions; the state has rotated keys.
"""

from typing import Unpack

from torch import Tensor

from unrolled.attention._options import GENERAL
from unrolled.attention._packed import attend_packed
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.attention.sparse_transformer.factorized import Layout, factorized_attention, factorized_pattern
from unrolled.attention.sparse_transformer.state import (
    STATE_GROWS,
    FactorizedState,
    empty_state,
    factorized_prefill,
    factorized_step,
)
from unrolled.ops.options import check_integers


class SparseTransformerAttention(MultiHeadAttention[FactorizedState, None]):
    """Multi-head attention of the Sparse Transformer.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        kind: "fixed" or "strided".
        stride: l, about the square root of the expected length.
        window: w of the strided kind, at least l - 1; l by default, as in the paper (its code has l - 1).
        summary: c of the fixed kind, a divisor of l; a quarter of l by default, or l if 4 does not divide it.
        subblocks: u of the fixed kind, the number of different summaries that the heads read in turn, up to
            l / c.
        reads: "merged", each head reads the union of near and far keys; "split", the first half of the heads
            reads the near keys and the others the far ones, with at least two heads; "near" or "far", all
            heads read those alone, for layers that alternate.

    Raises:
        ValueError: sizes out of range, or an option of the other kind.
    """

    supports = GENERAL.but(cross=False, recurrence="growing", single_queries=False)
    growing = STATE_GROWS

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        kind: str = "fixed",
        stride: int = 128,
        window: int | None = None,
        summary: int | None = None,
        subblocks: int = 1,
        reads: str = "merged",
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        if kind == "fixed" and window is not None:
            raise ValueError(
                f"window is {window}, but must be None for fixed blocks, whose length is stride = {stride}"
            )
        if kind == "strided" and (summary, subblocks) != (None, 1):
            raise ValueError(
                f"summary is {summary} and subblocks {subblocks}, but must be left out for the strided kind"
            )
        check_integers(1, stride=stride)
        window = stride if window is None else window
        if summary is None:
            summary = stride if stride % 4 else stride // 4
        self.layout = Layout(self.causal, n_heads, kind, stride, window, summary, subblocks, reads)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        if masks.cu_seqlens is not None:
            return attend_packed(self.attend, heads, masks.cu_seqlens)
        q, k = self.rotated(heads)
        return factorized_attention(q, k, heads.v, self.layout, key_padding_mask=masks.key_padding_mask)

    def init_heads(self, batch_size: int) -> FactorizedState:
        """Make the state of `batch_size` sequences before their first token: no tokens."""
        like = self.out_weight.new_empty(0, dtype=self.state_dtype)
        return empty_state(self.layout, batch_size, self.n_kv_heads, self.head_dim, self.value_dim, like)

    def prefill_heads(
        self, heads: Heads[None], state: FactorizedState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, FactorizedState]:
        """Attend in parallel to the state and to the new tokens."""
        q, k = self.rotated(heads)
        return factorized_prefill(q, k, heads.v, self.layout, state, key_padding_mask=key_padding_mask)

    def step_heads(self, heads: Heads[None], state: FactorizedState) -> tuple[Tensor, FactorizedState]:
        """Attend from one token to the keys that it reads."""
        return factorized_step(*self.rotated(heads), heads.v, self.layout, state)

    def pattern(self, length: int) -> Tensor:
        """Count how often query i reads key j: `[H,length,length]`, 0 or 1."""
        return factorized_pattern(self.layout, length).long()

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return ", ".join(f"{name}={value!r}" for name, value in vars(self.layout).items())
