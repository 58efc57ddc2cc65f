"""The options and the recurrence shared by all mechanisms with a sliding window."""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from unrolled.attention._heads import KeyMasks
from unrolled.attention.base import CommonOptions, Heads, Inputs, MultiHeadAttention
from unrolled.ops.options import check_integers_only
from unrolled.ops.sequence import Latest, last_tokens
from unrolled.ops.window.dilated import dilated_window_attention
from unrolled.ops.window.state import WindowState, empty_window, window_prefill, window_step


def window_sides(window: int | tuple[int, int], *, causal: bool) -> tuple[int, int]:
    """Turn `window` into `(left, right)`, the numbers of keys read before and after the token itself.

    A pair is returned as it is. A number w stands for (w - 1, 0) if causal, which is w keys with the token
    itself, and for (w/2, w/2) otherwise.

    Raises:
        ValueError: a negative number, a causal window with keys after the token or with w = 0, or an odd w if
            not causal.
    """
    if type(window) is int:
        check_integers_only(window=window)
        if causal and window >= 1:
            return window - 1, 0
        if not causal and window >= 0 and window % 2 == 0:
            return window // 2, window // 2
        need = "at least 1, the token itself" if causal else "even and not negative, half of it on each side"
        raise ValueError(f"window is {window}, but must be {need}, or a pair (left, right)")
    pair = list(window) if isinstance(window, tuple | list) else []
    if len(pair) != 2 or not all(type(side) is int and side >= 0 for side in pair):
        raise ValueError(f"window is {window!r}, but must be one number or (left, right), neither negative")
    check_integers_only(window=max(pair))
    if causal and pair[1]:
        raise ValueError(f"window is {window}, but a causal one must be (left, 0), with nothing ahead")
    return pair[0], pair[1]


def dilation_per_head(dilation: int | Sequence[int], n_heads: int) -> tuple[int, ...]:
    """Turn `dilation` into one number for each head.

    Raises:
        ValueError: a dilation below 1, or not one for each head.
    """
    given = list(dilation) if isinstance(dilation, Sequence) else [dilation] * n_heads
    if any(type(d) is not int for d in given):
        raise ValueError(f"dilation is {dilation!r}, but must be an integer, or one for each head")
    if len(given) != n_heads:
        raise ValueError(f"dilation has {len(given)} values, but must have n_heads = {n_heads}")
    if not all(d >= 1 for d in given):
        raise ValueError(f"dilation is {dilation}, but must be at least 1")
    check_integers_only(dilation=max(given))
    return tuple(given)


class SlidingWindow(MultiHeadAttention[WindowState, Inputs]):
    """Multi-head attention with a window; its causal form reads nothing else.

    Its arguments are described in `WindowAttention`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        window: int | tuple[int, int],
        dilation: int | Sequence[int] = 1,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        self.window_size = window_sides(window, causal=self.causal)
        self.dilation = dilation_per_head(dilation, n_heads)

    def near(self, q: Tensor, k: Tensor, v: Tensor, **masks: Unpack[KeyMasks]) -> tuple[Tensor, Tensor]:
        """Attend to the window: `o [B,T,H,M]` and `lse [B,T,H]`. A padded key keeps its position."""
        window_size, dilation = self.window_size, self.dilation
        return dilated_window_attention(q, k, v, window_size=window_size, dilation=dilation, **masks)

    @property
    def reach(self) -> int:
        """How many tokens back the window reaches."""
        return self.window_size[0] * max(self.dilation)

    def init_heads(self, batch_size: int) -> WindowState:
        """Make the state of `batch_size` sequences before their first token: an empty window."""
        if self.supports.recurrence == "none":
            return super().init_heads(batch_size)
        like = self.out_weight.new_empty(0, dtype=self.state_dtype)
        return empty_window(batch_size, self.reach, self.n_kv_heads, self.head_dim, self.value_dim, like)

    def prefill_heads(
        self, heads: Heads[Inputs], state: WindowState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        """Attend in parallel, continuing from a state."""
        (q, k), left, gap, padding = self.rotated(heads), self.window_size[0], self.dilation, key_padding_mask
        return window_prefill(q, k, heads.v, state, left=left, dilation=gap, key_padding_mask=padding)

    def summarise(self, heads: Heads[Inputs], key_padding_mask: Tensor | None) -> Latest:
        """Keep the last keys and values, as many as the window reaches back."""
        _, k = self.rotated(heads)
        n = min(self.reach, k.shape[1])
        k, count = last_tokens(k, key_padding_mask, n)
        v, _ = last_tokens(heads.v, key_padding_mask, n)
        return Latest({"k": k.transpose(1, 2), "v": v.transpose(1, 2)}, count)

    def step_heads(self, heads: Heads[Inputs], state: WindowState) -> tuple[Tensor, WindowState]:
        """Attend from one token to the window before it."""
        q, k = self.rotated(heads)
        return window_step(q, k, heads.v, state, left=self.window_size[0], dilation=self.dilation)
