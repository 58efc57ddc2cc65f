r"""Longformer attention: a window for every token, and a few global tokens that read all and are read by all.

    local i:     keys W_i and G, with q, k, v             W_i = { i + m d : -left <= m <= right }
    global i:    all keys,       with q^g, k^g, v^g       G: the global tokens of the sequence

Each is softmax attention over its own keys: o_i = sum_j a_ij v_j, a_ij ~ exp(q_i . k_j / sqrt(D)). A global
key that is also in the window counts once. Global queries have projections of their own; local queries read a
global token through its local key and value. Which tokens are global depends on the task: the first one for
classification, those of the question for question answering. The dilation d leaves gaps in the window, and
each head may have its own.

Causal attention is that of the paper's language models: the left window alone, without global tokens.

Beltagy, Peters and Cohan 2020, "Longformer: The Long-Document Transformer", arXiv 2004.05150, section 3.1
(window, dilation, global tokens, projections) and 4.1 (causal).

Cost per head, with w = left + right + 1 keys and g global tokens: time O(T (w + 2 g) (D+M)), memory
O(T (D+M)); causal, time O(w (D+M)) and state O(left d (D+M)) per generated token.
Cannot: read another sequence, honour an arbitrary `attn_mask`, or be causal with global tokens.
Equals softmax attention: where the window covers the sequence and no token is global; where all tokens are
global, with the global projections.

With `rotary`, local and global queries and keys are rotated by their positions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._options import GENERAL
from unrolled.attention._packed import attend_packed
from unrolled.attention._parts import attend_to_keys
from unrolled.attention._window import SlidingWindow
from unrolled.attention.base import CommonOptions, Heads, Masks, Projected
from unrolled.contract import UnsupportedError
from unrolled.ops.checks import shape
from unrolled.ops.dense import Linear, linear_part
from unrolled.ops.merge import merge_softmax
from unrolled.ops.options import check_integers_only
from unrolled.ops.packing import reorder, valid_first, valid_tokens_first
from unrolled.ops.window import window_attention
from unrolled.ops.window.dilated import window_pattern

INIT_STD = 0.02  # of the global projections


class Globals(NamedTuple):
    """The input, which the global projections read, and which tokens are global, if given."""

    x: Tensor  # [B,T,d_model]
    mask: Tensor | None  # [B,T]


def global_positions(chosen: int | Sequence[int], n_valid: Tensor, length: int) -> Tensor:
    """Mark the first `chosen` tokens of each row, or those at the `chosen` positions: `[B,length]`.

    Rows have `n_valid [B]` tokens. A negative position counts from the end of its row. A row that is too
    short for a position has no such global token.
    """
    place = torch.arange(length, device=n_valid.device)
    if isinstance(chosen, int):
        return (place < chosen) & (place < n_valid.unsqueeze(1))
    at = torch.tensor(chosen, device=n_valid.device, dtype=torch.long)
    at = torch.where(at < 0, at + n_valid.unsqueeze(1), at)  # [B,g]
    beyond = at.new_full((), length)
    at = torch.where((at >= 0) & (at < n_valid.unsqueeze(1)), at, beyond)
    marks = torch.zeros(n_valid.shape[0], length + 1, dtype=torch.bool, device=n_valid.device)
    return marks.scatter(1, at, True)[:, :length]


def _checked_globals(chosen: int | Sequence[int]) -> int | tuple[int, ...]:
    """Require a number of tokens or positions."""
    positions = [chosen] if type(chosen) is int and chosen >= 0 else chosen
    if (
        isinstance(positions, Sequence)
        and not isinstance(positions, str)
        and all(type(position) is int for position in positions)
    ):
        for position in positions:
            check_integers_only(global_tokens=position)
        return chosen if isinstance(chosen, int) else tuple(positions)
    raise ValueError(f"global_tokens is {chosen!r}, but must be a number of tokens or a list of positions")


def longformer_reference(local: Projected, global_: Projected, is_global: Tensor, window: Tensor) -> Tensor:
    """One head of one row by the equations.

    Args:
        local: q `[T,D]`, k `[T,D]` and v `[T,M]`.
        global_: q^g, k^g and v^g.
        is_global: `[T]`, True = global.
        window: `[T,T]`, True where the window of a query includes the key.

    Returns:
        `[T,M]`.
    """

    def softmax(q: Tensor, k: Tensor, v: Tensor, read: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[1])
        return scores.masked_fill(~read, -torch.inf).softmax(-1) @ v

    near = softmax(*local, window | is_global)
    far = softmax(*global_, torch.ones_like(window))
    return torch.where(is_global.unsqueeze(1), far, near)


class LongformerAttention(SlidingWindow[Globals]):
    """Multi-head Longformer attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        window: number w of keys that a token reads. If causal, the token itself is one of them, as in
            Mistral. If bidirectional, w is even, and the token reads w/2 keys on each side and itself, as in
            Longformer. Or a pair `(left, right)`, the numbers of keys before and after the token.
        dilation: distance d from one key of the window to the next; one number, or a list with one per head.
        global_tokens: how many tokens at the beginning are global, or a list of the positions of the global
            tokens, where negative ones count from the end. Positions that a sequence does not have are
            left out. By default the first token, or none if causal. A `global_mask` passed to `forward`
            replaces it.

    Raises:
        ValueError: a window that is negative, odd if bidirectional, or with keys after the token if causal; a
            dilation below 1, or not one for each head; a negative number of global tokens.
        UnsupportedError: causal attention with global tokens.
    """

    supports = GENERAL.but(cross=False, single_queries=False, global_mask=True, reads_input=True)
    global_proj: Linear | None

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        window: int | tuple[int, int] = 512,
        dilation: int | Sequence[int] = 1,
        global_tokens: int | Sequence[int] | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, window=window, dilation=dilation, **common)
        causal = self.causal
        if causal and global_tokens:
            raise UnsupportedError(
                "longformer attention has no global tokens where causal, since they read the future; "
                "use global_tokens=0"
            )
        if global_tokens:
            self.supports = self.supports.but(causal=False, recurrence="none")
        if causal:
            self.supports = self.supports.but(global_mask=False, reads_input=False)
        default = 0 if causal else 1
        self.global_tokens = _checked_globals(default if global_tokens is None else global_tokens)
        self.global_proj = None
        if not causal:
            bias = self.qkv_proj.bias is not None
            self.global_proj = Linear(d_model, sum(self.widths), bias=bias)
            nn.init.normal_(self.global_proj.weight, std=INIT_STD)
            if bias:
                nn.init.zeros_(self.global_proj.bias)

    @torch.no_grad()
    def copy_local_to_global(self) -> None:
        """Copy the local projections to the global ones, for example after loading a dense model."""
        if self.global_proj is None:
            raise UnsupportedError("causal longformer attention has no global projections to copy to")
        self.global_proj.load_state_dict(self.qkv_proj.state_dict())

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend within `query [B,T,d_model]`: `[B,T,d_model]`, as `MultiHeadAttention.forward`.

        Args:
            query: the sequence, which attends to itself.
            key, value, attn_mask: refused.
            cu_seqlens: int32 `[N+1]` offsets of N packed sequences, each with global tokens of its own.
            key_padding_mask: `[B,T]`, True = padding, which is never global.
            global_mask: `[B,T]`, True = global, in place of `global_tokens`; a row may have any number of
                global tokens. Finding the largest number in a row synchronises with a GPU.
        """
        masks = Masks(key_padding_mask, attn_mask, cu_seqlens)
        return self._forward(query, key, value, masks, global_mask=global_mask)

    def read_input(self, x: Tensor, global_mask: Tensor | None = None) -> Globals:
        """Return the input, for the global projections, and the checked mask of global tokens."""
        if global_mask is not None:
            self._check_global_mask(global_mask, x)
        return Globals(x, global_mask)

    def attend(self, heads: Heads[Globals], masks: Masks) -> Tensor:
        """Attend in parallel."""
        if masks.cu_seqlens is not None:
            return attend_packed(self.attend, heads, masks.cu_seqlens)
        (q, k), v = self.rotated(heads), heads.v
        x, global_mask = heads.inputs
        padding, back = masks.key_padding_mask, None
        if padding is not None:
            if global_mask is not None:
                global_mask = reorder(global_mask, valid_first(padding))
            (q, k, v, x), padding, back = valid_tokens_first(padding, q, k, v, x)
        is_global, n_global = self._which(global_mask, padding, q)
        if n_global:
            o = self._with_globals((q, k, v), x, is_global, n_global, padding)
        else:
            o, _ = self.near(q, k, v, key_padding_mask=padding)
        return o if back is None else back(o)

    def pattern(self, length: int) -> Tensor:
        """Return which keys each query reads, with the module's `global_tokens`: `[H,length,length]`, 1 or 0.

        Global queries use the global projections, all others the local ones.
        """
        near = window_pattern(length, self.window_size, self.dilation)
        is_global = global_positions(self.global_tokens, torch.tensor([length]), length)[0].long()
        return near | is_global | is_global.unsqueeze(1)

    def _with_globals(
        self, local: Projected, x: Tensor, is_global: Tensor, n_global: int, padding: Tensor | None
    ) -> Tensor:
        """Attend in rows with padding last and up to `n_global` global tokens each: `[B,T,H,M]`."""
        q, k, v = local
        (B, T, H, _), M = q.shape, v.shape[3]
        # Local queries: the window without global keys, merged with the global keys.
        places = valid_first(~is_global)[:, :n_global]
        missing = torch.arange(n_global, device=q.device) >= is_global.sum(1, keepdim=True)
        hidden = is_global if padding is None else is_global | padding
        global_k, global_v = reorder(k, places), reorder(v, places)
        far = attend_to_keys(q, global_k, global_v, missing)
        o, _ = merge_softmax([self.near(q, k, v, key_padding_mask=hidden), far])
        # Global queries: all keys by the global projections, written over the outputs of the local queries.
        read = window_attention(
            *self._global_heads(x, places), window_size=(-1, -1), key_padding_mask=padding
        )
        # Rows with fewer global tokens write the rest to an extra token, which is dropped.
        rows = places.masked_fill(missing, T)[:, :, None, None].expand(B, n_global, H, M)
        return torch.cat([o, o.new_zeros(B, 1, H, M)], 1).scatter(1, rows, read.to(o.dtype))[:, :T]

    def _global_heads(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project the global tokens to queries `[B,g,H,D]`, and all tokens to keys and values."""
        assert self.global_proj is not None  # otherwise there are no global tokens
        (B, T, _), g = x.shape, places.shape[1]
        widths = [self.widths[0], sum(self.widths[1:])]
        q = linear_part(self.global_proj, widths, 0, reorder(x, places))
        k, v = torch.split(linear_part(self.global_proj, widths, 1, x), self.widths[1:], -1)
        q = q.reshape(B, g, self.n_heads, self.head_dim)
        k = k.reshape(B, T, self.n_kv_heads, self.head_dim)
        v = v.reshape(B, T, self.n_kv_heads, self.value_dim)
        if self.rotary:
            q, k = self.rotate(q, places), self.rotate(k, torch.arange(T, device=x.device).expand(B, T))
        return q, k, v

    def _which(self, global_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> tuple[Tensor, int]:
        """Return which tokens are global `[B,T]`, and the largest number of them in a row."""
        B, T = q.shape[:2]
        if global_mask is not None:
            is_global = global_mask if padding is None else global_mask & ~padding
            return is_global, int(is_global.sum(1).max()) if B else 0
        chosen = self.global_tokens
        most = chosen if isinstance(chosen, int) else len(chosen)
        n_valid = q.new_full((B,), T, dtype=torch.long) if padding is None else (~padding).sum(1)
        return global_positions(chosen, n_valid, T), min(most, T)

    def _check_global_mask(self, mask: Tensor, x: Tensor) -> None:
        if self.global_proj is None:
            raise UnsupportedError("causal longformer attention does not support global_mask")
        if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
            raise ValueError(
                f"global_mask is {mask.dtype} of shape {shape(mask)}, but must be torch.bool "
                f"{shape(x)[:2]} with True = global"
            )
