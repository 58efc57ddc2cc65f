r"""Window attention: softmax attention to the tokens near each one, at a cost that follows the window.

    o_i = sum_{j in W_i} a_ij v_j        a_ij = exp(q_i . k_j / sqrt(D)) / sum_{j' in W_i} exp(q_i . k_j' / sqrt(D))
    W_i = { i + m d : -left <= m <= right }

The dilation d leaves gaps: a window reads every d-th token, and reaches d times as far. Each head may have its
own. After L layers, a token has heard from those within the sum of left d over the layers. Run one token at a
time, the state is the last left d keys and values.

Beltagy et al. 2020, "Longformer", arXiv 2004.05150, section 3.1; with causal=True and d = 1 the sliding window
of Mistral 7B (Jiang et al. 2023, arXiv 2310.06825, section 2).

Cost per head: time O(T w (D+M)), memory O(T (D+M)), with w = left + right + 1 keys, whatever d is; time
O(w (D+M)) and state O(left d (D+M)) per generated token.
Cannot: read another sequence, or honour an arbitrary `attn_mask`.
Equals softmax attention: where the window covers the sequence, left and right at least T - 1 with d = 1; and
within each residue class i mod d where left d and right d are at least T - 1.

With `rotary`, queries and keys are rotated by their positions before they meet, and the state holds rotated
keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unrolled.attention._multihead import Heads, Masks, MultiHeadAttention
from unrolled.contract import Supports
from unrolled.ops.checks import check_key_padding_mask
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.positions import rotary
from unrolled.ops.window_dilated import dilated_window_attention, window_pattern
from unrolled.ops.window_options import dilation_per_head, window_sides
from unrolled.ops.window_state import WindowState, empty_window, window_prefill, window_step


class WindowAttention(MultiHeadAttention):
    """Multi-head window attention.

    Args:
        d_model, n_heads, causal, n_kv_heads, head_dim, value_dim, bias, rotary: see `MultiHeadAttention`.
        window: how many keys a token reads. Causal: that many, itself included, as in Mistral. Bidirectional:
            an even number, half on each side, and itself, as in Longformer. Or `(left, right)`, how many
            before and after itself.
        dilation: distance d of one key to the next, for all heads or one for each.

    Raises:
        ValueError: a window that is negative, odd where it is halved, or looks ahead where causal; a dilation
            below 1, or not one for each head.
    """

    supports = Supports(
        causal=True, bidirectional=True, cross=False, padding=True, packing=True, recurrence="constant"
    )
    state_type = WindowState

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        causal: bool = False,
        window: int | tuple[int, int] = 256,
        dilation: int | Sequence[int] = 1,
        **shared: Any,
    ):
        super().__init__(d_model, n_heads, causal=causal, **shared)
        self.window_size = window_sides(window, causal=causal)
        self.dilation = dilation_per_head(dilation, n_heads)

    def attend(self, heads: Heads, masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k, v = _rotated(heads)
        padding, back = masks.key_padding_mask, None
        if padding is not None:
            if masks.cu_seqlens is not None:
                raise ValueError(
                    "key_padding_mask was given with cu_seqlens, but a pack has no padding: give one of them"
                )
            check_key_padding_mask(padding, *k.shape[:2])
            (q, k, v), padding, back = valid_tokens_first(padding, q, k, v)
        o, _ = dilated_window_attention(
            q,
            k,
            v,
            window_size=self.window_size,
            dilation=self.dilation,
            key_padding_mask=padding,
            cu_seqlens=masks.cu_seqlens,
        )
        return o if back is None else back(o)

    def pattern(self, length: int) -> Tensor:
        """Show the window of each query: `[H,length,length]`, 1 or 0."""
        return window_pattern(length, self.window_size, self.dilation)

    def init_state(self, batch_size: int) -> WindowState:
        """Make the state of `batch_size` sequences that have not begun: a window with nothing in it."""
        reach = self.window_size[0] * max(self.dilation)
        like = self.out_proj.weight.new_empty(0, dtype=self._state_dtype)
        return empty_window(batch_size, reach, self.n_kv_heads, self.head_dim, self.value_dim, like)

    def prefill_heads(
        self, heads: Heads, state: WindowState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        """Attend in parallel, from a state to a state."""
        return window_prefill(
            *_rotated(heads),
            state,
            left=self.window_size[0],
            dilation=self.dilation,
            key_padding_mask=key_padding_mask,
        )

    def step_heads(self, heads: Heads, state: WindowState) -> tuple[Tensor, WindowState]:
        """Attend from one token to the window before it."""
        return window_step(*_rotated(heads), state, left=self.window_size[0], dilation=self.dilation)


def _rotated(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, positions, _ = heads
    return (q, k, v) if positions is None else (rotary(q, positions), rotary(k, positions), v)
