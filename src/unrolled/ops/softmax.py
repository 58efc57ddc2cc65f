"""Softmax attention: torch's scaled_dot_product_attention behind our layout and masks, and its cache.

o_i = sum_j softmax_j(scale q_i . k_j) v_j        Vaswani et al. 2017 (arXiv 1706.03762), eq. 1
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from unrolled.ops.checks import (
    check_attn_mask,
    check_cu_seqlens,
    check_key_padding_mask,
    check_qkv,
    check_step,
    shape,
    transforming,
)
from unrolled.ops.masks import causal_mask, packed_mask, without_padding
from unrolled.ops.operators import differentiable_gradients
from unrolled.ops.options import check_booleans, check_finite
from unrolled.ops.precision import promoted, without_autocast

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
RECENT = 64  # tokens that a cache collects before it joins them to its past


class KVCache(NamedTuple):
    """All keys and values seen so far, as a value: what a function here is given, it never writes to.

    Tokens join a short `recent` part; when that holds 64, it is joined to the `past`. So a token copies 1/64
    of the cache, where it has to read all of it, and two continuations can share a past.
    """

    past_k: Tensor  # [B,G,P,D]
    past_v: Tensor  # [B,G,P,M]
    past_padding: Tensor  # [B,P], True = no such token in this row
    recent_k: Tensor  # [B,G,W,D]
    recent_v: Tensor  # [B,G,W,M]
    recent_padding: Tensor  # [B,W]
    position: Tensor  # [B], valid tokens seen


CACHE_GROWS = {
    name: (axis, letter)
    for part, letter in (("past", "P"), ("recent", "W"))
    for name, axis in ((f"{part}_k", 2), (f"{part}_v", 2), (f"{part}_padding", 1))
}


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention in time quadratic in the length (equation above).

    Args:
        q: queries `[B,T,H,D]`.
        k: keys `[B,S,G,D]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        causal: query i attends to keys up to i + S - T only.
        key_padding_mask: `[B,S]`, True = padding.
        attn_mask: broadcastable to `[B,H,T,S]`; boolean (True = attend) or floating point (added
            to the scores).
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1, T = S).
        scale: factor of the scores, 1/sqrt(D) by default.
        backend: "math", "flash", "efficient" or "cudnn", a kernel of torch's; for tests and benchmarks, by
            default torch chooses.

    Returns:
        `o [B,T,H,M]`; 0, with zero gradient, for a query that has nothing to attend to.

    Raises:
        ValueError: an argument of another shape or type.
    """
    check_qkv(q, k, v)
    check_booleans(causal=causal)
    if scale is not None:
        check_finite(scale=scale)
    (B, T, H, _), S = q.shape, k.shape[1]
    out_dtype = v.dtype
    q, k, v = promoted(q, k, v)
    allowed, bias = None, None
    if attn_mask is not None:
        check_attn_mask(attn_mask, (B, H, T, S))
        if attn_mask.dtype == torch.bool:
            allowed = attn_mask
        else:
            bias, allowed = attn_mask.to(q.dtype), attn_mask > -torch.inf
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, B, S)
        k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
        allowed = _both(allowed, ~key_padding_mask[:, None, None, :])
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, k)
        allowed = _both(allowed, packed_mask(cu_seqlens, T))
    plainly_causal = bool(causal and allowed is None and T == S > 0)  # torch takes no symbol of a bool
    if (causal or S == 0) and not plainly_causal:
        allowed = _both(allowed, causal_mask(T, S, q.device))
    if allowed is None:
        return _sdpa(q, k, v, None, plainly_causal, scale, backend).to(out_dtype)
    something = allowed.any(-1, keepdim=True)
    # A row without any key attends to all of them instead, and is then zeroed: no NaN in either direction.
    allowed = allowed | ~something
    mask = allowed if bias is None else bias.masked_fill(~allowed, -torch.inf).masked_fill(~something, 0)
    mask = mask[(None,) * (4 - mask.dim())]  # broadcast, since torch's fused kernels copy what they get
    o = _sdpa(q, k, v, mask, False, scale, backend)
    return o.masked_fill(~something.expand(B, H, T, 1).transpose(1, 2), 0).to(out_dtype)


def softmax_or_zero(scores: Tensor) -> Tensor:
    """Softmax along the last axis; 0, with zero gradient, where all scores are minus infinity."""
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def empty_cache(batch_size: int, n_kv_heads: int, head_dim: int, value_dim: int, like: Tensor) -> KVCache:
    """Make a cache that has seen nothing, of the device and type of `like`."""
    k, v = (
        like.new_empty(batch_size, n_kv_heads, 0, head_dim),
        like.new_empty(batch_size, n_kv_heads, 0, value_dim),
    )
    padding = torch.empty(batch_size, 0, dtype=torch.bool, device=like.device)
    position = torch.zeros(batch_size, dtype=torch.long, device=like.device)
    return KVCache(k, v, padding, k, v, padding, position)


def softmax_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    *,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, KVCache]:
    """Causal attention of `q [B,T,H,D]` to the cache and to new keys and values of the same T tokens.

    Padded tokens (`key_padding_mask [B,T]`, True = padding) are never attended to and do not count as seen.

    Returns:
        `o [B,T,H,M]`, and the cache with the new tokens.
    """
    check_qkv(q, k, v)
    anything_padded = key_padding_mask is not None or cached_length(cache) > 0
    cache = extend_cache(cache, k, v, key_padding_mask)
    dtype = cache.past_k.dtype
    with without_autocast(q.device):
        o = softmax_attention(
            q.to(dtype),
            cache.past_k.transpose(1, 2),
            cache.past_v.transpose(1, 2),
            causal=True,
            key_padding_mask=cache.past_padding if anything_padded else None,
            scale=scale,
        )
    return o.to(v.dtype), cache


def softmax_step(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, *, scale: float | None = None
) -> tuple[Tensor, KVCache]:
    """One token: key `[B,G,D]` and value `[B,G,M]` join the cache, then the query `[B,H,D]` reads all of it.

    Returns:
        `o [B,H,M]`, and the new cache.
    """
    check_step(q, k, v)
    cache = extend_cache_by_one(cache, k, v)
    (B, H, D), (_, G, M), dtype = q.shape, v.shape, cache.past_k.dtype
    with without_autocast(q.device):
        grouped = (q.to(dtype) * (D**-0.5 if scale is None else scale)).reshape(B, G, H // G, D)
        weights = cached_scores(grouped, cache).softmax(-1)
        P = cache.past_k.shape[2]
        o = weights[..., :P] @ cache.past_v + weights[..., P:] @ cache.recent_v
    return o.reshape(B, H, M).to(v.dtype), cache


def cached_length(cache: KVCache) -> int:
    """Number of places in a cache, those of padding included."""
    return cache.past_padding.shape[1] + cache.recent_padding.shape[1]


def cached_scores(q: Tensor, cache: KVCache) -> Tensor:
    """Scores of scaled queries `[B,G,P,D]` and all that is cached, `[B,G,P,S]`; padding has -inf."""
    scores = torch.cat([q @ cache.past_k.mT, q @ cache.recent_k.mT], dim=-1)
    padding = torch.cat([cache.past_padding, cache.recent_padding], dim=1)
    return scores.masked_fill(padding[:, None, None, :], -torch.inf)


def extend_cache(cache: KVCache, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> KVCache:
    """Join new keys `[B,T,G,D]` and values `[B,T,G,M]`, and all that is recent, to the past."""
    _check_cache(cache, k, v)
    B, T = k.shape[:2]
    if key_padding_mask is None:
        new_padding = torch.zeros(B, T, dtype=torch.bool, device=k.device)
    else:
        check_key_padding_mask(key_padding_mask, B, T)
        new_padding = key_padding_mask
        k, v = without_padding(k, new_padding), without_padding(v, new_padding)
    dtype = cache.past_k.dtype
    keys = torch.cat([cache.past_k, cache.recent_k, k.transpose(1, 2).to(dtype)], dim=2)
    values = torch.cat([cache.past_v, cache.recent_v, v.transpose(1, 2).to(dtype)], dim=2)
    padding = torch.cat([cache.past_padding, cache.recent_padding, new_padding], dim=1)
    position = cache.position + (~new_padding).sum(1)
    return KVCache(keys, values, padding, *_nothing_recent(keys, values, padding), position)


def extend_cache_by_one(cache: KVCache, k: Tensor, v: Tensor) -> KVCache:
    """Join one key `[B,G,D]` and value `[B,G,M]` to what is recent; all of that joins the past at 64."""
    _check_cache(cache, k.unsqueeze(1), v.unsqueeze(1))
    dtype = cache.past_k.dtype
    recent_k = torch.cat([cache.recent_k, k.unsqueeze(2).to(dtype)], dim=2)
    recent_v = torch.cat([cache.recent_v, v.unsqueeze(2).to(dtype)], dim=2)
    recent_padding = torch.nn.functional.pad(cache.recent_padding, (0, 1))
    past_k, past_v, past_padding = cache.past_k, cache.past_v, cache.past_padding
    if recent_k.shape[2] == RECENT:
        past_k, past_v = torch.cat([past_k, recent_k], dim=2), torch.cat([past_v, recent_v], dim=2)
        past_padding = torch.cat([past_padding, recent_padding], dim=1)
        recent_k, recent_v, recent_padding = _nothing_recent(recent_k, recent_v, recent_padding)
    return KVCache(past_k, past_v, past_padding, recent_k, recent_v, recent_padding, cache.position + 1)


def _nothing_recent(k: Tensor, v: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty parts of their own: a slice of what has joined the past would keep it all in memory."""
    (B, G, _, D), M = k.shape, v.shape[3]
    return k.new_empty(B, G, 0, D), v.new_empty(B, G, 0, M), padding.new_empty(B, 0)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    backend: str | None,
) -> Tensor:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, but must be None or one of {', '.join(BACKENDS)}")
    if backend is None and transforming():
        backend = "math"  # the only one that has forward mode
    with nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
        o = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)
    if backend is None and o.requires_grad and not torch.compiler.is_compiling():
        o = _Detour.apply(o, q, k, v, mask, causal, scale)  # type: ignore[no-untyped-call]
    return o


class _Detour(torch.autograd.Function):
    """Leave `o` as it is, but lead its gradient past the fused kernel where it will be differentiated again.

    The gradients of the fused kernels have none themselves. With `create_graph`, the math form makes them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Return `o`."""
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal, ctx.scale = causal, scale
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `o` for the kernel, or those of `q`, `k`, `v` and `mask` in its place."""
        if not torch.is_grad_enabled():
            return grad, None, None, None, None, None, None

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor]:
            return (_sdpa(q, k, v, mask, ctx.causal, ctx.scale, "math"),)

        return None, *differentiable_gradients(run, ctx.saved_tensors, [grad]), None, None


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _check_cache(cache: KVCache, k: Tensor, v: Tensor) -> None:
    (B, _, G, D), M = k.shape, v.shape[3]
    for part in ("past", "recent"):
        padding = getattr(cache, f"{part}_padding")
        S = padding.shape[-1] if padding.dim() else 0
        for name, wanted in (("k", [B, G, S, D]), ("v", [B, G, S, M]), ("padding", [B, S])):
            found = shape(getattr(cache, f"{part}_{name}"))
            if found != wanted:
                raise ValueError(f"cache.{part}_{name} has shape {found}, but these inputs want {wanted}")
    if shape(cache.position) != [B]:
        raise ValueError(f"cache.position has shape {shape(cache.position)}, but these inputs want [{B}]")
