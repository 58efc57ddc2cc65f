r"""Sliding-window softmax attention in plain PyTorch, block by block: the form that runs everywhere.

The queries are cut into blocks of C. The keys that a block can read lie side by side: from the first that its
first query may read to the last that its last query may read, C + left + right of them or fewer. A block
multiplies its queries with this slice of keys only, so time is O(T (C + left + right) (D + M)). A one-sided
window reads one side only, and an unbounded side reads all keys there. A short sequence is a single dense
block. With the scores s_ij = scale q_i . k_j, minus infinity outside the window, a block computes

    P = exp(s - max s)        o = P V / P 1        lse = max s + log(P 1)

and keeps lse. The backward pass computes the scores again; with dO and dlse arriving,

    P  = exp(s - lse)           dV = P^T dO          dP = dO V^T
    dS = P * (dP - delta)       delta_i = sum_j P_ij dP_ij - dlse_i
    dQ = scale dS K             dK = scale dS^T Q

delta_i equals o_i . dO_i - dlse_i, which is shorter. But o has been rounded to the type of v, and delta has
to cancel dP where P is nearly 1. Memory: the inputs, the outputs and the scores of one block.

The blocks are those of Beltagy et al. 2020, "Longformer" (arXiv 2004.05150), except that a block reads rows
of keys. Reading whole neighbour blocks would need padding and up to one more block of keys.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.merge import average_and_lse
from unrolled.ops.packing import segment_ids
from unrolled.ops.precision import accumulation_dtype, without_autocast

BLOCK = 64  # queries; of 32, 64, 128 and 256 the fastest on a CPU, for windows from 16 to 512 keys


class Inputs(NamedTuple):
    """The inputs of window attention; padded keys and values must be finite."""

    q: Tensor  # [B,T,H,D]
    k: Tensor  # [B,S,G,D]
    v: Tensor  # [B,S,G,M]
    key_padding_mask: Tensor | None  # [B,S]


class Options(NamedTuple):
    """The options of window attention."""

    cu_seqlens: Tensor | None  # int32 [N+1]
    window_size: tuple[int, int]
    scale: float


class Heads(NamedTuple):
    """The inputs by key head, in the accumulation dtype. X = B*G; P = H/G query heads share a key head."""

    q: Tensor  # [X,P,T,D], scaled
    k: Tensor  # [X,S,D]
    v: Tensor  # [X,S,M]
    padding: Tensor | None  # [X,1,S]
    segments: Tensor | None  # [T]


class Block(NamedTuple):
    """Queries `begin..end` and the keys `low..high` that at least one of them reads."""

    begin: int
    end: int
    low: int
    high: int


def supports(inputs: Inputs) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,H,M]` in the dtype of `v` and `lse [B,T,H]` in the accumulation dtype.

    Every operation is differentiable, so higher derivatives go through this same code.
    """
    (B, T, H, _), (_, S, G, M) = inputs.q.shape, inputs.v.shape
    with without_autocast(inputs.q.device):
        x = _by_head(inputs, options)
        unread, blocks = _blocks(T, S, options.window_size)
        outs = [x.v.new_zeros(B, unread, H, M)]
        lses = [x.v.new_full((B, unread, H), -math.inf)]
        for block in blocks:
            scores = _scores(x, block, T, S, options.window_size)
            o, lse = average_and_lse(scores, x.v[:, block.low : block.high])
            outs.append(_join(o, B, G, block))
            lses.append(_join(lse, B, G, block).squeeze(-1))
        return torch.cat(outs, 1).to(inputs.v.dtype), torch.cat(lses, 1)


def backward(
    grad_o: Tensor, grad_lse: Tensor, inputs: Inputs, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `q`, `k` and `v`."""
    (B, T, H, D), (_, S, G, M) = inputs.q.shape, inputs.v.shape
    with without_autocast(inputs.q.device):
        x = _by_head(inputs, options)
        nothing = lse == -math.inf
        lse = _split(lse.masked_fill(nothing, 0).unsqueeze(-1), G)
        grad_lse = _split(grad_lse.masked_fill(nothing, 0).unsqueeze(-1), G)
        g = _split(grad_o.to(x.v.dtype).masked_fill(nothing.unsqueeze(-1), 0), G)
        dq = x.q.new_zeros(B, T, H, D)
        dk, dv = x.k.new_zeros(B, S, G, D), x.v.new_zeros(B, S, G, M)
        for block in _blocks(T, S, options.window_size)[1]:
            begin, end, low, high = block
            weights = (_scores(x, block, T, S, options.window_size) - _rows(lse, block)).exp_()
            g_rows = _rows(g, block)
            d_weights = weights * (g_rows @ x.v[:, low:high].mT)
            delta = d_weights.sum(-1, keepdim=True) - _rows(grad_lse, block)
            d_scores = d_weights.addcmul_(weights, delta, value=-1)
            dq[:, begin:end] = _join(d_scores @ x.k[:, low:high] * options.scale, B, G, block)
            dk[:, low:high] += _keys(d_scores.mT @ _rows(x.q, block), B, G)
            dv[:, low:high] += _keys(weights.mT @ g_rows, B, G)
        return dq.to(inputs.q.dtype), dk.to(inputs.k.dtype), dv.to(inputs.v.dtype)


def _blocks(T: int, S: int, window_size: tuple[int, int]) -> tuple[int, Iterator[Block]]:
    """Return the number of first queries that are before all keys, and the blocks of the rest."""
    left, right = bounded(window_size, T, S)
    unread = max(0, T - S - right) if S else T

    def cut() -> Iterator[Block]:
        for begin in range(unread, T, BLOCK):
            end = min(begin + BLOCK, T)
            yield Block(begin, end, max(0, begin + S - T - left), min(S, end + S - T + right))

    return unread, cut()


def bounded(window_size: tuple[int, int], T: int, S: int) -> tuple[int, int]:
    """Replace an unbounded side by one that reaches every key from every query."""
    left, right = window_size
    return S if left < 0 else left, T if right < 0 else right


def _scores(x: Heads, block: Block, T: int, S: int, window_size: tuple[int, int]) -> Tensor:
    """`[X,P*C,K]`, minus infinity for the keys that a query may not read."""
    begin, end, low, high = block
    scores = _rows(x.q, block) @ x.k[:, low:high].mT
    left, right = bounded(window_size, T, S)
    first, last = begin + S - T, end - 1 + S - T
    if last - left <= low and high - 1 <= first + right and x.padding is None and x.segments is None:
        return scores
    query = torch.arange(first, last + 1, device=scores.device).repeat(x.q.shape[1]).unsqueeze(-1)
    key = torch.arange(low, high, device=scores.device)
    hidden = (key < query - left) | (key > query + right)
    if x.segments is not None:  # only of T = S
        hidden = hidden | (x.segments[query] != x.segments[low:high])
    if x.padding is not None:
        hidden = hidden | x.padding[..., low:high]
    return scores.masked_fill(hidden, -math.inf)


def _by_head(inputs: Inputs, options: Options) -> Heads:
    q, k, v, padding = inputs
    cu_seqlens = options.cu_seqlens
    G, dtype = k.shape[2], accumulation_dtype(q.dtype)
    return Heads(
        _split(q.to(dtype) * options.scale, G),
        _split(k.to(dtype), G).squeeze(1),
        _split(v.to(dtype), G).squeeze(1),
        None if padding is None else padding.repeat_interleave(G, 0).unsqueeze(1),
        None if cu_seqlens is None else segment_ids(cu_seqlens, q.shape[1]),
    )


def _split(x: Tensor, G: int) -> Tensor:
    """[B,T,G*P,D] -> [B*G,P,T,D], without a copy for a single row."""
    B, T, H, D = x.shape
    return x.reshape(B, T, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B * G, H // G, T, D)


def _rows(x: Tensor, block: Block) -> Tensor:
    """[X,P,T,D] -> [X,P*C,D]: what belongs to the queries of a block, for all that share a key head."""
    X, P, _, D = x.shape
    return x[:, :, block.begin : block.end].reshape(X, P * (block.end - block.begin), D)


def _join(x: Tensor, B: int, G: int, block: Block) -> Tensor:
    """[B*G,P*C,D] -> [B,C,G*P,D]."""
    C, D = block.end - block.begin, x.shape[2]
    P = x.shape[1] // C
    return x.reshape(B, G, P, C, D).permute(0, 3, 1, 2, 4).reshape(B, C, G * P, D)


def _keys(x: Tensor, B: int, G: int) -> Tensor:
    """[B*G,K,D] -> [B,K,G,D]."""
    return x.reshape(B, G, *x.shape[1:]).transpose(1, 2)
