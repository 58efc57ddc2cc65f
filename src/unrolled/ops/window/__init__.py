r"""Window attention: softmax attention in which a query attends to the keys near it.

With the position p_i = i + S - T of query i among the keys (bottom-right aligned, so i itself when T = S),

    W_i = { j : p_i - left <= j <= p_i + right }        lse_i = log sum_{j in W_i} exp(scale q_i . k_j)
    o_i = sum_{j in W_i} exp(scale q_i . k_j - lse_i) v_j

Beltagy et al. 2020, "Longformer" (arXiv 2004.05150), section 3.1; `window_size = (left, right)` is counted as
in flash-attn, without the query itself: a causal window of w keys is (w - 1, 0), Longformer's window w is
(w/2, w/2), and -1 leaves a side unbounded.

Parts of a softmax over keys that do not overlap merge exactly through their lse:

    lse = log sum_p exp(lse_p)        o = sum_p exp(lse_p - lse) o_p
"""

import math
from itertools import pairwise
from typing import Literal, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from unrolled.ops.checks import check_qkv, wrong
from unrolled.ops.masks import without_padding
from unrolled.ops.options import score_scale
from unrolled.ops.precision import accumulation_dtype, promoted, without_autocast
from unrolled.ops.window import operator as kernels
from unrolled.ops.window.blocks import Inputs, Options


class WindowOptions(TypedDict, total=False):
    """Keyword arguments of `window_attention` and its definition."""

    window_size: Required[tuple[int, int]]
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    scale: float | None


class _OutputOnly(WindowOptions, total=False):
    return_lse: Literal[False]
    backend: str | None


class _OutputAndSum(WindowOptions, total=False):
    return_lse: Required[Literal[True]]
    backend: str | None


@overload
def window_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[_OutputOnly]) -> Tensor: ...


@overload
def window_attention(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[_OutputAndSum]
) -> tuple[Tensor, Tensor]: ...


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: tuple[int, int],
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention to a window of keys, in time and memory proportional to T x window.

    The equations are in `unrolled.ops.window`.

    Args:
        q: queries `[B,T,H,D]`.
        k: keys `[B,S,G,D]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        window_size: `(left, right)`, how many keys before and after its own position a query attends to; -1
            for all of that side, so `(-1, 0)` is causal attention and `(-1, -1)` full attention.
        key_padding_mask: `[B,S]`, True = padding: such a key is masked, but keeps its position.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1, T = S). With an unbounded
            side, the time per query is proportional to the length of its sequence in the C++ kernels, and to
            the length of the row in the other forms.
        scale: factor of the scores, 1/sqrt(D) by default.
        return_lse: also return the logarithm of the softmax's denominator.
        backend: "plain" for the PyTorch form, "native" for the C++ kernels of a CPU (not in fp64),
            "flex" for torch's flex_attention on CUDA; for tests and benchmarks; None selects the fastest.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and with `return_lse` the natural logarithm `lse [B,T,H]`. The
        softmax is computed and `lse` returned in fp32 (fp64 for fp64 inputs). A query that has nothing to
        attend to gives o = 0 with zero gradient and lse = minus infinity. Gradients of any order reach q, k
        and v through both results; with "flex", of the first order only.

    Raises:
        ValueError: an argument of the wrong shape or type; decreasing offsets; a window below -1; a
            scale that is not finite.
    """
    k, v = _check_and_mask(q, k, v, window_size, key_padding_mask, cu_seqlens)
    out_dtype = v.dtype
    q, k, v = promoted(q, k, v)
    inputs = Inputs(q, k, v, key_padding_mask)
    left, right = window_size
    options = Options(cu_seqlens, (left, right), score_scale(scale, q.shape[3]))
    o, lse = kernels.window_attention(inputs, options, backend)
    o = o.to(out_dtype)
    return (o, lse) if return_lse else o


def window_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[WindowOptions]
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `window_attention` by its definition, a masked softmax over all scores `[B,H,T,S]`.

    Quadratic in the length. Every other form must equal it; its gradients come from autograd. Arguments and
    results are those of `window_attention`.
    """
    window_size, padding = options["window_size"], options.get("key_padding_mask")
    cu_seqlens = options.get("cu_seqlens")
    k, v = _check_and_mask(q, k, v, window_size, padding, cu_seqlens)
    T, S, scale = q.shape[1], k.shape[1], score_scale(options.get("scale"), q.shape[3])
    spans = [(0, T, 0, S)]
    if cu_seqlens is not None:
        spans = [(a, b, a, b) for a, b in pairwise(cu_seqlens.tolist())] or [(0, 0, 0, 0)]
    parts = []
    for a, b, c, d in spans:
        inputs = Inputs(q[:, a:b], k[:, c:d], v[:, c:d], None if padding is None else padding[:, c:d])
        parts.append(_reference(inputs, window_size, scale))
    o, lse = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return (o, lse) if return_lse else o


def _reference(inputs: Inputs, window_size: tuple[int, int], scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, key_padding_mask = inputs
    (T, H), (S, G) = q.shape[1:3], k.shape[1:3]
    left, right = window_size
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    with without_autocast(q.device):
        k_heads, v_heads = (x.to(dtype).repeat_interleave(H // G, 2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bths", q.to(dtype) * scale, k_heads)
        # How far each key lies ahead of each query.
        ahead = torch.arange(S, device=q.device) - torch.arange(S - T, S, device=q.device).unsqueeze(-1)
        allowed = torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            allowed = allowed & (ahead >= -left)
        if right >= 0:
            allowed = allowed & (ahead <= right)
        allowed = allowed[None, :, None, :]
        if key_padding_mask is not None:
            allowed = allowed & ~key_padding_mask[:, None, None, :]
        nothing = ~allowed.any(-1, keepdim=True)
        # A fully masked row attends to all keys and its output is then zeroed: no NaN forward or backward.
        scores = scores.masked_fill(~(allowed | nothing), -math.inf)
        o = torch.einsum("bths,bshm->bthm", scores.softmax(-1), v_heads).masked_fill(nothing, 0)
        lse = scores.logsumexp(-1).masked_fill(nothing.squeeze(-1), -math.inf)
        return o.to(v.dtype), lse


def _check_and_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: tuple[int, int],
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check every argument, and return the keys and values with zeros at the padding."""
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not pair or not all(isinstance(side, int) and side >= -1 for side in window_size):
        raise wrong("window_size", window_size, "(left, right), each at least 0, or -1 for unbounded")
    if key_padding_mask is not None:
        k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
    return k, v
