r"""Window attention: softmax attention of each token to the tokens near it; the cost grows with the window.

    o_i = sum_{j in W_i} a_ij v_j    a_ij = exp(q_i . k_j / sqrt(D)) / sum_{l in W_i} exp(q_i . k_l / sqrt(D))
    W_i = { i + m d : -left <= m <= right }

With dilation d a window reads every d-th token and reaches d times as far. Each head may have its own
dilation. A layer reaches left * d tokens back, and the reaches of several layers add up. When it runs
one token at a time, its state is the keys and values of these left * d tokens.

Beltagy et al. 2020, "Longformer", arXiv 2004.05150, section 3.1; causal and with d = 1, the sliding window of
Mistral 7B (Jiang et al. 2023, arXiv 2310.06825, section 2).

Cost per head: time O(T w (D+M)), memory O(T (D+M)), with w = left + right + 1 keys for any d; time
O(w (D+M)) and state O(left d (D+M)) per generated token.
Cannot: read another sequence, or honour an arbitrary `attn_mask`.
Equals softmax attention: with d = 1, where left >= T - 1 and, unless causal, right >= T - 1; with d > 1,
within each residue class i mod d, where left d >= T - 1 and, unless causal, right d >= T - 1.

With `rotary`, queries and keys are rotated by their positions, and the state holds rotated keys.
"""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from unrolled.attention._options import GENERAL
from unrolled.attention._window import SlidingWindow
from unrolled.attention.base import CommonOptions, Heads, Masks
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.window.dilated import window_pattern


class WindowAttention(SlidingWindow[None]):
    """Multi-head window attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        window: number w of keys that a token reads. If causal, the token itself is one of them, as in
            Mistral. If bidirectional, w is even, and the token reads w/2 keys on each side and itself, as in
            Longformer. Or a pair `(left, right)`, the numbers of keys before and after the token.
        dilation: distance d from one key of the window to the next; one number, or a list with one per head.

    Raises:
        ValueError: a window that is negative, odd if bidirectional, or with keys after the token if causal; a
            dilation below 1, or not one for each head.
    """

    supports = GENERAL.but(cross=False, single_queries=False, sequence=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        window: int | tuple[int, int] = 256,
        dilation: int | Sequence[int] = 1,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, window=window, dilation=dilation, **common)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        (q, k), v = self.rotated(heads), heads.v
        padding, back = masks.key_padding_mask, None
        if padding is not None:
            (q, k, v), padding, back = valid_tokens_first(padding, q, k, v)
        o, _ = self.near(q, k, v, key_padding_mask=padding, cu_seqlens=masks.cu_seqlens)
        return o if back is None else back(o)

    def pattern(self, length: int) -> Tensor:
        """Return the window of each query: `[H,length,length]`, 1 or 0."""
        return window_pattern(length, self.window_size, self.dilation)
