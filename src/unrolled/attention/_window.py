"""What the mechanisms with a sliding window share: its options, and how they run one token at a time."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unrolled.attention.base import Heads, Inputs, MultiHeadAttention
from unrolled.ops.window.dilated import dilated_window_attention
from unrolled.ops.window.state import WindowState, empty_window, window_prefill, window_step


def window_sides(window: int | tuple[int, int], *, causal: bool) -> tuple[int, int]:
    """Turn `window` into `(left, right)`, the numbers of keys read before and after the token itself.

    A pair is taken as it is. One number w is w keys up to the token itself where causal, (w - 1, 0), and w/2
    on each side of it where not.

    Raises:
        ValueError: negative sides, a right side where causal, no key, or an odd number to halve.
    """
    if type(window) is int:
        if causal and window >= 1:
            return window - 1, 0
        if not causal and window >= 0 and window % 2 == 0:
            return window // 2, window // 2
        wanted = (
            "at least 1, the token itself" if causal else "even and not negative, half of it on each side"
        )
        raise ValueError(f"window is {window}, but must be {wanted}, or a pair (left, right)")
    pair = list(window) if isinstance(window, tuple | list) else []
    if len(pair) != 2 or not all(type(side) is int and side >= 0 for side in pair):
        raise ValueError(f"window is {window!r}, but must be one number or (left, right), neither negative")
    if causal and pair[1]:
        raise ValueError(f"window is {window}, but a causal one must be (left, 0), with nothing ahead")
    return pair[0], pair[1]


def dilation_per_head(dilation: int | Sequence[int], n_heads: int) -> tuple[int, ...]:
    """Turn `dilation` into one for each head.

    Raises:
        ValueError: below 1, or another number of them.
    """
    given = list(dilation) if isinstance(dilation, Sequence) else [dilation] * n_heads
    if any(type(d) is not int for d in given):
        raise ValueError(f"dilation is {dilation!r}, but must be an integer, or one for each head")
    if len(given) != n_heads:
        raise ValueError(
            f"dilation has {len(given)} values, but must have one for each of n_heads = {n_heads}"
        )
    if not all(d >= 1 for d in given):
        raise ValueError(f"dilation is {dilation}, but must be at least 1")
    return tuple(given)


class SlidingWindow(MultiHeadAttention[WindowState, Inputs]):
    """Multi-head attention with a window, whose causal form reads that window alone.

    Args:
        d_model, n_heads: see `MultiHeadAttention`, as for all others.
        window: how many keys a token reads. Causal: that many, itself included, as in Mistral. Bidirectional:
            an even number, half on each side, and itself, as in Longformer. Or `(left, right)`, how many
            before and after itself.
        dilation: distance d of one key to the next, for all heads or one for each.

    Raises:
        ValueError: a window that is negative, odd where it is halved, or looks ahead where causal; a dilation
            below 1, or not one for each head.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        causal: bool = False,
        window: int | tuple[int, int],
        dilation: int | Sequence[int] = 1,
        **shared: Any,
    ):
        super().__init__(d_model, n_heads, causal=causal, **shared)
        self.window_size = window_sides(window, causal=causal)
        self.dilation = dilation_per_head(dilation, n_heads)

    def near(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the window: `o [B,T,H,M]` and `lse [B,T,H]`. A padded key keeps its position."""
        return dilated_window_attention(
            q,
            k,
            v,
            window_size=self.window_size,
            dilation=self.dilation,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
        )

    def init_state(self, batch_size: int) -> WindowState:
        """Make the state of `batch_size` sequences that have not begun: a window with nothing in it."""
        if self.supports.recurrence == "none":
            return super().init_state(batch_size)
        reach = self.window_size[0] * max(self.dilation)
        like = self.out_proj.weight.new_empty(0, dtype=self.state_dtype)
        return empty_window(batch_size, reach, self.n_kv_heads, self.head_dim, self.value_dim, like)

    def prefill_heads(
        self, heads: Heads[Inputs], state: WindowState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        """Attend in parallel, from a state to a state."""
        return window_prefill(
            *heads.rotated(),
            heads.v,
            state,
            left=self.window_size[0],
            dilation=self.dilation,
            key_padding_mask=key_padding_mask,
        )

    def step_heads(self, heads: Heads[Inputs], state: WindowState) -> tuple[Tensor, WindowState]:
        """Attend from one token to the window before it."""
        return window_step(*heads.rotated(), heads.v, state, left=self.window_size[0], dilation=self.dilation)
