"""Softmax attention over whole sequences, with the layout and masks of this library.

o_i = sum_j softmax_j(scale q_i . k_j) v_j        Vaswani et al. 2017 (arXiv 1706.03762), eq. 1

On a CPU, the C++ kernels of window attention compute it, as a window without bounds. On a Zen 4 with
gradients, 8 causal sequences of 256 tokens with 4 heads of width 32 take half the time of torch's kernel in
fp32 and a third in bf16; 128 sequences of 18 tokens in bf16 take a ninth. torch's kernels compute it on other
devices, with other masks, in fp64, and where they are faster: in bf16 if the processor has a matrix unit, and
in fp32 without gradients for a few queries.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from unrolled.ops.checks import check_attn_mask, check_qkv
from unrolled.ops.masks import causal_mask, packed_mask, without_padding
from unrolled.ops.observing import transforming
from unrolled.ops.operators import differentiable_gradients
from unrolled.ops.options import check_booleans, score_scale
from unrolled.ops.precision import promoted, without_autocast
from unrolled.ops.processor import has_matrix_unit
from unrolled.ops.window import native
from unrolled.ops.window import operator as window
from unrolled.ops.window.blocks import Inputs, Options

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
MOST_WITHOUT_MATRIX_UNIT = 1 << 15
"""Multiply-adds of a query with its keys. With more, training in bf16 is faster on a matrix unit."""
FEW_QUERIES = 8
"""In fp32 without gradients and padding, torch's kernels are faster for so few queries."""
MANY_KEYS = 1024
"""If causal, only on this many keys: torch's kernels need a mask."""


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
        backend: "native" for the C++ kernels of a CPU (not in fp64, not with `attn_mask`), or one of torch's
            kernels, "math", "flash", "efficient" or "cudnn". This is for tests and benchmarks; None selects
            the fastest.

    Returns:
        `o [B,T,H,M]`; 0, with zero gradient, for a query that has nothing to attend to.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    check_booleans(causal=causal)
    factor = score_scale(scale, q.shape[3])
    (B, T, H, _), S = q.shape, k.shape[1]
    out_dtype = v.dtype
    q, k, v = promoted(q, k, v)
    if key_padding_mask is not None:
        k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
    inputs = Inputs(q, k, v, key_padding_mask)
    if backend == "native" or (backend is None and attn_mask is None and _is_native_faster(inputs, causal)):
        if attn_mask is not None:
            raise ValueError("backend is 'native', which has no attn_mask; use None for one that has")
        options = Options(cu_seqlens, (-1, 0 if causal else -1), factor)
        return window.window_attention(inputs, options, "native")[0].to(out_dtype)
    allowed, bias = None, None
    if attn_mask is not None:
        check_attn_mask(attn_mask, (B, H, T, S))
        if attn_mask.dtype == torch.bool:
            allowed = attn_mask
        else:
            q, k, v, bias = promoted(q, k, v, attn_mask)  # q's type may not hold the numbers of the mask
            allowed = bias > -torch.inf
    if key_padding_mask is not None:
        allowed = _both(allowed, ~key_padding_mask[:, None, None, :])
    if cu_seqlens is not None:
        allowed = _both(allowed, packed_mask(cu_seqlens, T))
    plainly_causal = bool(causal and allowed is None and T == S > 0)  # SDPA rejects torch.SymBool
    if (causal or S == 0) and not plainly_causal:
        allowed = _both(allowed, causal_mask(T, S, q.device))
    if allowed is None:
        return _sdpa(q, k, v, None, plainly_causal, scale, backend).to(out_dtype)
    something = allowed.any(-1, keepdim=True)
    # A fully masked row attends to all keys and its output is then zeroed: no NaN forward or backward.
    allowed = allowed | ~something
    mask = allowed if bias is None else bias.masked_fill(~allowed, -torch.inf).masked_fill(~something, 0)
    mask = mask[(None,) * (4 - mask.dim())]  # not expanded, as torch's fused kernels copy a mask
    with nullcontext() if bias is None else without_autocast(q.device):
        o = _sdpa(q, k, v, mask, False, scale, backend)
    return o.masked_fill(~something.expand(B, H, T, 1).transpose(1, 2), 0).to(out_dtype)


def _is_native_faster(inputs: Inputs, causal: bool) -> bool:
    """Whether the C++ kernels can compute this, and are faster than torch's kernels.

    The C++ kernels compute several queries side by side. For a few queries in fp32 without gradients,
    torch's kernels are faster. On a Zen 3, with 8 heads of width 64 and 1,024 keys or more, they take half
    the time for one query, and three quarters for 8 causal ones. With padding, there is little difference.

    In bf16, torch's kernels use a matrix unit if the processor has one. Without gradients, they are then
    faster: on a Xeon, up to three times. With gradients, this depends on the length and the width: there, 8
    causal sequences of 256 tokens with 4 heads of width 32 take three times as long as in the C++ kernels.
    """
    if not native.can_replace(inputs):
        return False
    q, k, v, padding = inputs
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if q.dtype == torch.float32 and q.shape[1] <= FEW_QUERIES and padding is None and not training:
        return causal and k.shape[1] < MANY_KEYS
    if q.dtype != torch.bfloat16 or not has_matrix_unit():
        return True
    multiply_adds = k.shape[1] * k.shape[3] // (2 if causal else 1)
    return training and multiply_adds <= MOST_WITHOUT_MATRIX_UNIT


def softmax_or_zero(scores: Tensor) -> Tensor:
    """Softmax along the last axis; 0, with zero gradient, where all scores are minus infinity."""
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


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
        raise ValueError(f"backend is {backend!r}, but must be None or one of native, {', '.join(BACKENDS)}")
    if backend is None and transforming():
        backend = "math"  # the only kernel that supports forward-mode AD
    with nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
        q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))
        o = scaled_dot_product_attention(
            q_heads, k_heads, v_heads, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
        ).transpose(1, 2)
    if backend is None and o.requires_grad and not torch.compiler.is_compiling():
        o = _DoubleBackward.apply(o, q, k, v, mask, causal, scale)  # type: ignore[no-untyped-call]
    return o


class _DoubleBackward(torch.autograd.Function):
    """Return `o` unchanged, with a gradient that can be differentiated again.

    The gradients of torch's fused kernels cannot be differentiated. With `create_graph`, the math kernel
    computes them.
    """

    @staticmethod
    def forward(ctx: Any, o: Tensor, *arguments: Any) -> Tensor:
        """Return `o`; the arguments are those of `_sdpa` without the backend."""
        q, k, v, mask, ctx.causal, ctx.scale = arguments
        ctx.save_for_backward(q, k, v, mask)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `o` for the kernel, or those of `q`, `k`, `v` and `mask` instead."""
        if not torch.is_grad_enabled():
            return grad, None, None, None, None, None, None

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor]:
            return (_sdpa(q, k, v, mask, ctx.causal, ctx.scale, "math"),)

        return None, *differentiable_gradients(run, ctx.saved_tensors, [grad]), None, None


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b
