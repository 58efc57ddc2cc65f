r"""Nyströmformer attention: softmax attention approximated from m landmarks by the Nyström method.

    o = F A^+ (B v)        F = softmax(q k'^T / sqrt(D))     [T, m]
                           A = softmax(q' k'^T / sqrt(D))    [m, m]
                           B = softmax(q' k^T / sqrt(D))     [m, S]

Landmarks q' and k' are means over segments: of n valid tokens, the i-th is in segment floor(i m / n). A^+ is
the Moore-Penrose inverse, exact or approximated by a few steps of a third-order iteration,

    Z <- Z (13 - A Z (15 - A Z (7 - A Z))) / 4        from        Z = A^T / (|A|_1 |A|_inf).

Xiong, Zeng, Chakraborty, Tan, Fung, Li and Singh 2021, "Nyströmformer: A Nyström-Based Algorithm for
Approximating Self-Attention", arXiv 2102.03902: eq. 13 (definition), 14 (iteration), figure 4 (skip).

Cost per head: time O((T+S) m (D+M) + m^2 (m+M)), memory O((T+S) (D+M+m) + m^2).
Cannot: be causal (a landmark is a mean over past and future), or honour an arbitrary `attn_mask`. Weights may
be negative. More landmarks, more steps or the exact inverse may be worse, since few steps regularise.
Equals softmax attention: where there are no more than m queries or m keys; with the exact inverse, also where
all segments are equally long and each token equals the landmark of its segment.

With `rotary`, queries and keys are rotated by their positions before the means are taken.
"""

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._options import BIDIRECTIONAL_ONLY
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.ops.checks import check_qkv
from unrolled.ops.masks import without_padding, zero_padding
from unrolled.ops.node import like_attention, one_node
from unrolled.ops.options import check_integers
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.positions import positions_from_padding
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.softmax import softmax_attention

MAX_ITERATIONS = {torch.float32: 20, torch.float64: 40}
"""After these steps, the inverse is about as exact as the type allows; with more, rounding errors grow."""


def segment_means(x: Tensor, n_segments: int, key_padding_mask: Tensor | None = None) -> Tensor:
    """Means of `x [B,N,...]` over m segments of the n valid tokens of each row: `[B,m,...]`.

    Valid token i is in segment floor(i min(m, n) / n). So where n <= m, each token is its own segment, and
    segments from n on are empty: 0.
    """
    B, N = x.shape[:2]
    valid = x.new_ones(1, N, dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
    n = valid.sum(1, keepdim=True)
    segment = positions_from_padding(~valid) * n.clamp(max=n_segments) // n.clamp(min=1)
    numbers = torch.arange(n_segments, device=x.device).unsqueeze(1)
    member = (segment.unsqueeze(1) == numbers) & valid.unsqueeze(1)
    sums = member.to(x.dtype) @ x.flatten(2)
    means = sums / member.sum(2, keepdim=True).clamp(min=1)
    return means.reshape(B, n_segments, *x.shape[2:])


def iterative_pinv(a: Tensor, iterations: int = 6, start: Tensor | None = None) -> Tensor:
    """Approximate the pseudo-inverse of each matrix `a [...,m,m]` (equation above).

    Args:
        a: matrices, fp32 or fp64.
        iterations: number of steps, at most 20 in fp32 and 40 in fp64.
        start: the initial Z; by default A^T / (|A|_1 |A|_inf) of each matrix.

    Raises:
        ValueError: another type, or more iterations.
    """
    if a.dtype not in MAX_ITERATIONS:
        raise ValueError(f"a is {a.dtype}, but must be torch.float32 or torch.float64")
    _check_iterations(iterations, a.dtype)
    if start is None:
        norms = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
        start = a.mT / norms[..., None, None]
    one, z = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), start
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
    return z


def pinv_residual(a: Tensor, z: Tensor) -> Tensor:
    """Return the error of Z as inverse of A, |A Z A - A| / |A| in Frobenius norms: `[...,m,m]` to `[...]`."""
    return ((a @ z @ a - a).square().sum((-2, -1)) / a.square().sum((-2, -1))).sqrt()


def _inverse(a: Tensor, iterations: int | None) -> Tensor:
    if iterations is not None:
        return iterative_pinv(a, iterations)
    # Without this, a matrix that is not finite would be an error for all the others.
    wrong = ~a.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    inverse: Tensor = torch.linalg.pinv(a.masked_fill(wrong, 0))
    return inverse.masked_fill(wrong, torch.nan)


def _check_iterations(iterations: int, dtype: torch.dtype) -> None:
    if not 1 <= iterations <= MAX_ITERATIONS[dtype]:
        raise ValueError(
            f"iterations is {iterations}, but must be between 1 and {MAX_ITERATIONS[dtype]}, since "
            "rounding errors grow with more"
        )


def landmarks(
    q: Tensor, k: Tensor, n_landmarks: int, q_padding: Tensor | None, k_padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute q' and k' `[B,m,H,D]`, and A `[B,H,m,m]`, from `q [B,T,H,D]` and `k [B,S,G,D]`."""
    q_means = segment_means(q, n_landmarks, q_padding)
    k_means = segment_means(k, n_landmarks, k_padding)
    k_means = k_means.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = q_means.transpose(1, 2) @ k_means.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])
    return q_means, k_means, scores.softmax(-1)


def nystrom_reference(
    q: Tensor, k: Tensor, v: Tensor, n_landmarks: int, iterations: int | None = 6
) -> Tensor:
    """One head by the equations: `q [T,D]`, `k [S,D]`, `v [S,M]` to `[T,M]`; m <= T and S."""

    def means(x: Tensor) -> Tensor:
        segment = torch.arange(len(x), device=x.device) * n_landmarks // len(x)
        return torch.stack([x[segment == s].mean(0) for s in range(n_landmarks)])

    def kernel(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)

    inverse = _inverse(kernel(means(q), means(k)), iterations)
    return kernel(q, means(k)) @ inverse @ kernel(means(q), k) @ v


@one_node(like_attention)
def nystrom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    n_landmarks: int = 64,
    iterations: int | None = 6,
    key_padding_mask: Tensor | None = None,
    self_attention: bool = False,
) -> Tensor:
    """Attend from `q [B,T,H,D]` to `k [B,S,G,D]` and `v [B,S,G,M]`: `[B,T,H,M]`, computed in at least fp32.

    A row with at most m = `n_landmarks` valid keys, or at most m queries, gets softmax attention, which costs
    little there.

    Args:
        q, k, v: as for `softmax_attention`.
        n_landmarks: number of landmarks m.
        iterations: steps towards the inverse, at most 20 in fp32 and 40 in fp64; None for the exact one.
        key_padding_mask: `[B,S]`, True = padding.
        self_attention: queries and keys belong to the same tokens, so the mask holds for queries too.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v)
    (_, T, H, _), (S, G) = q.shape, k.shape[1:3]
    k, v = zero_padding(key_padding_mask, k, v)
    if min(T, S) <= n_landmarks:
        return softmax_attention(q, k, v, key_padding_mask=key_padding_mask)
    out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype, k.dtype, v.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q_padding = key_padding_mask if self_attention else None
    (q,) = zero_padding(q_padding, q)
    with without_autocast(q.device):
        q_means, k_means, a = landmarks(q, k, n_landmarks, q_padding, key_padding_mask)
        read = softmax_attention(q_means, k, v, key_padding_mask=key_padding_mask)
        values = (_inverse(a, iterations) @ read.transpose(1, 2)).transpose(1, 2)
        empty = None
        if key_padding_mask is not None:
            n = (~key_padding_mask).sum(1)
            # Where each key is a landmark, F is softmax attention, to be applied to the values themselves.
            own = segment_means(v, n_landmarks, key_padding_mask).repeat_interleave(H // G, dim=2)
            values = torch.where((n <= n_landmarks)[:, None, None, None], own, values)
            empty = torch.arange(n_landmarks, device=n.device) >= n.unsqueeze(1)
        return softmax_attention(q, k_means, values, key_padding_mask=empty).to(out_dtype)


class NystromformerAttention(MultiHeadAttention[None, None]):
    """Multi-head Nyströmformer attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        n_landmarks: number of landmarks m; sequences of up to m tokens get softmax attention.
        iterations: steps towards the inverse of A, from 1 to 20; `convergence` measures their error. None for
            the exact inverse by a singular value decomposition, which is slower and, unlike a few steps,
            amplifies small singular values.
        conv_width: odd width of a convolution over the values of neighbouring tokens, with one kernel per
            key/value head, that is added to the output (the skip of the paper, about 33 wide); None for no
            convolution. With a convolution, there is no cross-attention.

    Raises:
        ValueError: sizes out of range.
        UnsupportedError: causal attention.
    """

    supports = BIDIRECTIONAL_ONLY.but(positions=True)
    one_way = "each landmark is a mean over past and future; use linear attention or Perceiver AR"
    conv: nn.Conv2d | None

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_landmarks: int = 64,
        iterations: int | None = 6,
        conv_width: int | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_integers(1, n_landmarks=n_landmarks)
        if iterations is not None:
            check_integers(1, iterations=iterations)
            _check_iterations(iterations, torch.float32)
        self.n_landmarks, self.iterations, self.conv = n_landmarks, iterations, None
        if conv_width is not None:
            check_integers(1, conv_width=conv_width)
            if conv_width % 2 == 0:
                raise ValueError(f"conv_width is {conv_width}, but must be odd")
            G = self.n_kv_heads
            self.conv = nn.Conv2d(G, G, (conv_width, 1), padding="same", groups=G, bias=False)
            self.supports = self.supports.but(cross=False)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        (q, k), padding, itself = self.rotated(heads), masks.key_padding_mask, heads.positions is not None
        n, steps = self.n_landmarks, self.iterations
        o = nystrom_attention(
            q, k, heads.v, n_landmarks=n, iterations=steps, key_padding_mask=padding, self_attention=itself
        )
        return o if self.conv is None else o + self._skip(heads.v, padding)

    @torch.no_grad()
    def convergence(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Measure the error |A Z A - A| / |A| of the iterations on `x [B,T,d_model]`: `[B,H]`.

        See `pinv_residual`. Rows of up to m valid tokens need no inverse: 0.
        """
        self._check_input("x", x)
        B, T = x.shape[:2]
        masks = Masks(key_padding_mask)
        x = self._without_padding(x, masks)
        q, k = self.rotated(Heads(*self.project(x), self.positions_of(x, masks)))
        padding = x.new_zeros(B, T, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        dtype = accumulation_dtype(q.dtype)
        with without_autocast(q.device):
            q, k = (without_padding(y.to(dtype), padding) for y in (q, k))
            a = landmarks(q, k, self.n_landmarks, padding, padding)[2]
            residual = pinv_residual(a, _inverse(a, self.iterations))
        return residual.masked_fill(((~padding).sum(1) <= self.n_landmarks).unsqueeze(1), 0)

    def _skip(self, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Convolve the values `[B,T,G,M]` of each row's valid tokens along their sequence: `[B,T,H,M]`."""
        assert self.conv is not None  # otherwise this is not called
        if v.shape[1] == 0:
            y = v
        elif key_padding_mask is None:
            y = self.conv(v.transpose(1, 2)).transpose(1, 2)
        else:
            (v,), _, back = valid_tokens_first(key_padding_mask, v)
            y = back(self.conv(v.transpose(1, 2)).transpose(1, 2))
        return y.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2)
