r"""Factorized attention: softmax attention to two sets of keys, near ones and far ones, in several patterns.

With the stride l, query i reads these keys j, if causal only those with j <= i:

                 near                             far
    strided      |i - j| <= w                     (i - j) mod l = 0
    fixed        floor(j / l) = floor(i / l)      l - s - c <= j mod l < l - s, or j = i

where s = (h mod u) c for head h. A head that reads both sets reads their union by one softmax: the parts are
computed separately, and merged by their log-sum-exp.

    strided near    a window
    strided far     the tokens of each residue modulo l form a short sequence
    fixed near      each block of l is a short sequence
    fixed far       blocks read the summaries of earlier ones by pairs, pairs of pairs and so on

Child et al. 2019, "Generating Long Sequences with Sparse Transformers" (arXiv 1904.10509), section 4.3.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention._parts import Part, attend_to_keys
from unrolled.ops.block_sparse import block_sparse_attention
from unrolled.ops.checks import check_qkv
from unrolled.ops.chunks import cut
from unrolled.ops.merge import merge_softmax
from unrolled.ops.node import like_attention, one_node
from unrolled.ops.options import check_choice, check_integers, check_integers_only
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.window import window_attention

KINDS = ("strided", "fixed")
READS = ("merged", "split", "near", "far")


@dataclass(frozen=True)
class Layout:
    """The pattern of H heads; w, c and u are `window`, `summary` and `subblocks` of the definition."""

    causal: bool
    n_heads: int
    kind: str = "fixed"
    stride: int = 128
    window: int = 128
    summary: int = 32
    subblocks: int = 1
    reads: str = "merged"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("reads", self.reads, READS)
        check_integers(1, stride=self.stride)
        check_integers_only(window=self.window, summary=self.summary, subblocks=self.subblocks)
        if self.kind == "strided" and self.window < self.stride - 1:
            raise ValueError(
                f"window is {self.window}, but must be at least stride - 1 = {self.stride - 1}, or two hops "
                "miss keys"
            )
        if self.kind == "fixed" and (self.summary < 1 or self.stride % self.summary):
            raise ValueError(f"summary is {self.summary}, but must divide stride = {self.stride}")
        if self.kind == "fixed" and not 1 <= self.subblocks <= self.stride // self.summary:
            raise ValueError(
                f"subblocks is {self.subblocks}, but must be between 1 and stride / summary = "
                f"{self.stride // self.summary}"
            )

        if self.reads == "split" and self.n_heads < 2:
            raise ValueError("n_heads is 1, but must be at least 2 for reads = 'split'")

    def groups(self) -> list[tuple[range, bool, bool]]:
        """Group the heads that read the same keys, with whether they read near and far ones."""
        H, half = self.n_heads, (self.n_heads + 1) // 2
        u = self.subblocks if self.kind == "fixed" else 1
        if self.reads == "near":
            return [(range(H), True, False)]
        if self.reads == "split":
            return [(range(half), True, False), *((range(h, H, u), False, True) for h in range(half, H)[:u])]
        return [(range(h, H, u), self.reads == "merged", True) for h in range(H)[:u]]

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether query i of each head reads key j, `[...,H,X]` or `[...,1,X]`: the definition."""
        stride, head = self.stride, torch.arange(self.n_heads, device=j.device).unsqueeze(-1)
        if self.kind == "strided":
            near, far = (i - j).abs() <= self.window, (i - j) % stride == 0
        else:
            end = stride - head % self.subblocks * self.summary
            near, place = i // stride == j // stride, j % stride
            far = ((place >= end - self.summary) & (place < end)) | (i == j)
        if self.reads == "merged":
            allowed = near | far
        elif self.reads == "split":
            allowed = torch.where(head < (self.n_heads + 1) // 2, near, far)
        else:
            allowed = near if self.reads == "near" else far
        allowed = allowed.expand(*allowed.shape[:-2], self.n_heads, -1)
        return allowed & (j <= i) if self.causal else allowed


def factorized_pattern(layout: Layout, length: int) -> Tensor:
    """Return whether query i reads key j, `[H,length,length]`."""
    i, j = torch.arange(length)[:, None, None], torch.arange(length)
    return layout.allows(i, j).transpose(0, 1)


@one_node(like_attention)
def factorized_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Attend from `q [B,T,H,D]` to `k [B,T,G,D]`, `v [B,T,G,M]`, all of the same tokens: `[B,T,H,M]`.

    `key_padding_mask [B,T]` is True at padding, which takes no position.
    """
    check_qkv(q, k, v, key_padding_mask)
    (T, H), G = q.shape[1:3], k.shape[2]
    if k.shape[1] != T:
        raise ValueError(f"k has length {k.shape[1]}, but must have {T} like q: both are of the same tokens")
    padding, back = None, None
    if key_padding_mask is not None:
        (q, k, v), padding, back = valid_tokens_first(key_padding_mask, q, k, v)
        padding = None if layout.causal else padding  # it comes last, where causal queries do not read it
    groups, outputs = layout.groups(), []
    if len(groups) > 1:
        k, v = k.repeat_interleave(H // G, 2), v.repeat_interleave(H // G, 2)
    for heads, near, far in groups:
        of_group = slice(heads.start, heads.stop, heads.step)
        inputs = (q, k, v)
        if len(groups) > 1:
            inputs = (q[:, :, of_group], k[:, :, of_group], v[:, :, of_group])
        parts = [_near(*inputs, layout, padding)] if near else []
        if far and layout.kind == "strided":
            parts += _residues(*inputs, layout, padding, beyond=layout.window if near else -1)
        elif far:
            end = layout.stride - heads.start % layout.subblocks * layout.summary
            places = slice(end - layout.summary, end)
            parts += [] if near else [_own_summary(*inputs, layout, padding, places)]
            parts += _summaries(*inputs, layout, padding, places)
        outputs.append(merge_softmax(parts)[0])
    o = outputs[0]
    if len(groups) > 1:
        order = torch.tensor([head for heads, *_ in groups for head in heads], device=q.device)
        o = torch.cat(outputs, 2).index_select(2, order.argsort())
    return o if back is None else back(o)


def _block(q: Tensor, layout: Layout) -> int:
    """Return the length of a block: the stride, or all tokens if there are fewer."""
    return max(1, min(layout.stride, q.shape[1]))


def _near(q: Tensor, k: Tensor, v: Tensor, layout: Layout, padding: Tensor | None) -> Part:
    """Attend to the window, or to the query's own block."""
    if layout.kind == "strided":
        window_size = (layout.window, 0 if layout.causal else layout.window)
        return window_attention(q, k, v, window_size=window_size, key_padding_mask=padding, return_lse=True)
    (B, T), stride = q.shape[:2], _block(q, layout)
    q, k, v = (cut(x, stride).flatten(0, 1) for x in (q, k, v))
    padding = None if layout.causal else _cut_padding(padding, B, T, stride, q.device).flatten(0, 1)
    window_size = (-1, 0 if layout.causal else -1)
    part = window_attention(q, k, v, window_size=window_size, key_padding_mask=padding, return_lse=True)
    o, lse = (x.reshape(B, -(-T // stride) * stride, *x.shape[2:])[:, :T] for x in part)
    return o, lse


def _residues(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, padding: Tensor | None, *, beyond: int
) -> list[Part]:
    """Attend to the keys at multiples of the stride that are further than `beyond`.

    The tokens of each residue modulo the stride form a short sequence.
    """
    (B, T), stride = q.shape[:2], _block(q, layout)
    gap = beyond // stride + 1
    N = -(-T // stride)
    if gap >= N > 0:
        return []
    q, k, v = (cut(x, stride).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    mask = None
    if not layout.causal:
        mask = _cut_padding(padding, B, T, stride, q.device).transpose(1, 2).flatten(0, 1)

    def back(o: Tensor, lse: Tensor, before: int, after: int) -> Part:
        o, lse = pad(o, (0, 0, 0, 0, before, after)), pad(lse, (0, 0, before, after), value=-math.inf)
        o, lse = (torch.unflatten(x, 0, (B, stride)).transpose(1, 2).flatten(1, 2)[:, :T] for x in (o, lse))
        return o, lse

    if gap == 0:
        window_size = (-1, 0 if layout.causal else -1)
        part = window_attention(q, k, v, window_size=window_size, key_padding_mask=mask, return_lse=True)
        return [back(*part, 0, 0)]
    early, late = slice(0, max(0, N - gap)), slice(gap, None)
    parts = []
    for of_q, of_k, window_size, missing in (
        (late, early, (-1, 0), (min(gap, N), 0)),
        (early, late, (0, -1), (0, min(gap, N))),
    )[: 1 if layout.causal else 2]:
        inputs, masked = (q[:, of_q], k[:, of_k], v[:, of_k]), None if mask is None else mask[:, of_k]
        part = window_attention(*inputs, window_size=window_size, key_padding_mask=masked, return_lse=True)
        parts.append(back(*part, *missing))
    return parts


def _own_summary(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, padding: Tensor | None, places: slice
) -> Part:
    """Attend to the token itself, and to the summary of its own block."""
    stride = _block(q, layout)
    N = -(-q.shape[1] // stride)
    allowed = torch.eye(stride, dtype=torch.bool, device=q.device)
    allowed[:, places] = True
    allowed = allowed.tril() if layout.causal else allowed
    blocks = torch.arange(N, device=q.device).reshape(1, 1, N, 1)
    return block_sparse_attention(
        q, k, v, blocks, block_size=(stride, stride), allowed=allowed, key_padding_mask=padding
    )


def _summaries(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, padding: Tensor | None, places: slice
) -> list[Part]:
    """Attend to the summaries of all blocks before the query's own and, if not causal, after it.

    Blocks are paired, then pairs of pairs, and so on: of two neighbours of one size, the later reads all of
    the earlier. So each pair of blocks is computed once, and nothing is computed only to be masked.
    """
    (B, T), stride = q.shape[:2], layout.stride
    N, size, parts = -(-T // stride), 1, []
    if N <= 1:
        return []
    mask = None if layout.causal else _cut_padding(padding, B, T, stride, q.device)[:, :, places]
    q, k, v = cut(q, stride), cut(k, stride)[:, :, places], cut(v, stride)[:, :, places]
    while size < N:
        pairs = -(-N // (2 * size))

        def halves(x: Tensor, size: int = size, pairs: int = pairs) -> tuple[Tensor, Tensor]:
            if pairs > 1:
                x = cut(x, 2 * size).flatten(0, 1)
            return x[:, :size].flatten(1, 2), x[:, size:].flatten(1, 2)

        (q_0, q_1), (k_0, k_1), (v_0, v_1) = halves(q), halves(k), halves(v)
        mask_0, mask_1 = (None, None) if mask is None else (~x for x in halves(~mask))
        later = attend_to_keys(q_1, k_0, v_0, mask_0)
        if layout.causal:
            o, lse = torch.zeros_like(later[0][:, :1]), torch.full_like(later[1][:, :1], -math.inf)
            earlier = o.expand(-1, q_0.shape[1], -1, -1), lse.expand(-1, q_0.shape[1], -1)
        else:
            earlier = attend_to_keys(q_0, k_1, v_1, mask_1)
        o, lse = (
            torch.cat(x, 1).reshape(B, pairs * (x[0].shape[1] + x[1].shape[1]), *x[0].shape[2:])[:, :T]
            for x in zip(earlier, later, strict=True)
        )
        parts.append((o, lse))
        size *= 2
    return parts


def _cut_padding(padding: Tensor | None, B: int, T: int, stride: int, device: torch.device) -> Tensor:
    """Cut the padding into blocks `[B,N,stride]`, True also after the end."""
    padding = torch.zeros(B, T, dtype=torch.bool, device=device) if padding is None else padding
    return ~cut(~padding, stride)
