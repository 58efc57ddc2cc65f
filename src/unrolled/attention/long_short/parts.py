"""The two parts of long-short attention, to near keys and to landmarks, and what both need."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, pad

from unrolled.attention._parts import Part, attend_to_keys
from unrolled.ops.merge import merge_softmax
from unrolled.ops.packing import reorder
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.window import window_attention


def long_short_reference(
    q: Tensor, k: Tensor, v: Tensor, landmark_k: Tensor, landmark_v: Tensor, read: Tensor
) -> Tensor:
    """One head by the equation: `q [T,D]`, `k [S,D]`, `landmark_k [L,D]`, values likewise.

    `read [T,L+S]` is True for the landmarks and the keys that a query attends to.
    """
    scores = q @ torch.cat([landmark_k, k]).mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~read, -torch.inf).softmax(-1) @ torch.cat([landmark_v, v])


def pool(logits: Tensor, x: Tensor, padding: Tensor | None) -> Tensor:
    """Pool valid tokens, P^T x: `logits [...,S,G,r]`, `x [...,S,G,W]`, `padding [...,S]` to `[...,r,G,W]`.

    Computed in at least fp32; 0 if all tokens are padding.
    """
    dtype = accumulation_dtype(logits.dtype, x.dtype)
    with without_autocast(x.device):
        logits = logits.to(dtype)
        if padding is not None:
            hidden = padding[..., None, None]
            nothing = padding.all(-1)[..., None, None, None]
            logits = logits.masked_fill(hidden & ~nothing, -torch.inf)
            x = x.masked_fill(hidden, 0)
        pooled: Tensor = torch.einsum("...sgr,...sgw->...rgw", logits.softmax(-3), x.to(dtype))
        return pooled


def segment_window(q: Tensor, k: Tensor, v: Tensor, window: int, padding: Tensor | None) -> Part:
    """Attend to the segment of w tokens and w/2 keys (1 for w = 1, 0 for w = 0) on each side of it."""
    (B, T), width = q.shape[:2], max(window, 1)
    beside = max(window // 2, 1) if window else 0
    if 0 < T <= width:  # one segment, with nothing beside it
        width, beside = T, 0
    n = -(-T // width)
    padding = q.new_zeros(B, T, dtype=torch.bool) if padding is None else padding
    padding = pad(padding, (beside, n * width - T + beside), value=True)
    q = padded(q, 0, n * width - T).reshape(B * n, width, *q.shape[2:])
    # Segments overlap in their keys, so each key is copied up to twice (three times for w = 1).
    place = torch.arange(n, device=q.device).unsqueeze(1) * width
    place = (place + torch.arange(width + 2 * beside, device=q.device)).flatten()
    k, v, padding = (
        x.index_select(1, place).reshape(B * n, width + 2 * beside, *x.shape[2:])
        for x in (*(padded(x, beside, n * width - T + beside) for x in (k, v)), padding)
    )
    o, lse = attend_to_keys(q, k, v, padding)
    return tuple(x.reshape(B, n * width, *x.shape[2:])[:, :T] for x in (o, lse))  # type: ignore[return-value]


def earlier_chunks(q: Tensor, landmark_k: Tensor, landmark_v: Tensor) -> Part:
    """Attend from `q [B,n*l,H,D]` to the landmarks `[B,n,r,G,D]` of earlier chunks.

    The l queries of a chunk read the same landmarks, like query heads that share a key head. So each query
    becomes a head and each chunk a position, and causal attention runs once for each of the r landmarks.
    """
    (B, T, H, D), (n, r, G, M) = q.shape, landmark_v.shape[1:]
    chunk = T // n
    heads = q.reshape(B, n, chunk, G, H // G, D).permute(0, 1, 3, 4, 2, 5).reshape(B, n, H * chunk, D)[:, 1:]
    before = [(landmark_k[:, :-1, i], landmark_v[:, :-1, i]) for i in range(r)]
    parts = [window_attention(heads, k, v, window_size=(-1, 0), return_lse=True) for k, v in before]
    o, lse = merge_softmax(parts)
    o = o.reshape(B, n - 1, G, H // G, chunk, M).permute(0, 1, 4, 2, 3, 5).reshape(B, T - chunk, H, M)
    lse = lse.reshape(B, n - 1, H, chunk).transpose(2, 3).reshape(B, T - chunk, H)
    return padded(o, chunk, 0), pad(lse, (0, 0, chunk, 0), value=-torch.inf)


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """Pad `x [B,T,H,D]` with zeros along its length."""
    return pad(x, (0, 0, 0, 0, before, after))


def missing(count: Tensor, n: int) -> Tensor:
    """Return which of n places are empty if the last `count [B]` of them are filled: `[B,n]`."""
    return torch.arange(n, device=count.device) < n - count.unsqueeze(1)


def last(x: Tensor, end: Tensor, n: int) -> Tensor:
    """Return the n tokens of `x [B,S,...]` before token `end [B]`: `[B,n,...]`."""
    return reorder(x, end.unsqueeze(1) - n + torch.arange(n, device=x.device))


def normalised(x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
    """Normalise `x [...,G,W]` over all heads, in at least fp32; without a norm, return it unchanged."""
    if norm is None:
        return x
    dtype = accumulation_dtype(x.dtype)
    weight, bias = norm.weight.to(dtype), norm.bias.to(dtype)
    y = layer_norm(x.flatten(-2).to(dtype), norm.normalized_shape, weight, bias, norm.eps)
    return y.reshape(x.shape).to(x.dtype)
