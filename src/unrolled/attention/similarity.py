r"""Similarity attention: any kernel of queries and keys in place of exp(q . k / sqrt(D)).

    o_i = sum_j kappa(q_i, k_j) v_j / sum_j kappa(q_i, k_j)

    "exp"           exp(q . k / sqrt(D))
    "rbf"           exp(-|q - k|^2 / sqrt(D))
    "polynomial"    (q . k + offset)^degree
    "linear"        q . k

Attention is a kernel smoother, and a mask says which keys enter it. A floating-point `attn_mask` is the
logarithm of a second kernel, for example of positions, by which the first is multiplied. With `symmetric`,
queries and keys share their projection, and the kernel is symmetric in the inputs too.

Tsai, Bai, Yamada, Morency and Salakhutdinov 2019, "Transformer Dissection: A Unified Understanding of
Transformer's Attention via the Lens of Kernel", arXiv 1908.11775, definition 1 and section 3.

Cost per head: time O(T^2 (D+M)) and memory O(T^2) whatever the kernel; per generated token time and state
O(T (D+M)). It is meant for study and comparison. A kernel with finitely many features is faster as linear
attention.
Cannot: guarantee weights between 0 and 1 for a kernel that may be negative, such as "linear" and odd degrees.
A query whose weights sum to 0 gets 0. Where the sum is close to 0, the weights are large and of both signs.
Equals softmax attention: with "exp" and its default scale. Equals linear attention with the polynomial map:
with "polynomial" and its default degree and offset.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor

from unrolled.attention._cache import CachedAttention
from unrolled.attention._options import GENERAL
from unrolled.attention.base import CommonOptions, Heads, Masks, Projected
from unrolled.ops.checks import check_attn_mask, check_qkv
from unrolled.ops.dense import Linear, linear_part
from unrolled.ops.linear.chunked import safe_divide
from unrolled.ops.masks import causal_mask, packed_mask, zero_padding
from unrolled.ops.options import check_above_zero, check_finite, check_integers, score_scale
from unrolled.ops.packing import segment_ids
from unrolled.ops.precision import accumulation_dtype, exact_dtype, without_autocast
from unrolled.ops.softmax import KVCache, attend_to_cache


class Kernel(NamedTuple):
    """kappa = factor * exp(exponent), each broadcastable to `[B,H,T,S]`; the exponents may be large."""

    factor: Tensor
    exponent: Tensor


Similarity = Callable[[Tensor, Tensor], Kernel | Tensor]
"""Maps `q [B,T,H,D]` and `k [B,S,H,D]`, in fp32 or fp64, to their kernel, `[B,H,T,S]` if it is one tensor.

A similarity whose attribute `shift_invariant` is true depends on q - k alone. It is called with queries and
keys from which one key has been subtracted, since a large common offset would cost digits of the differences.
"""


@dataclass(frozen=True)
class Exponential:
    """kappa = exp(scale q . k), with scale = 1/sqrt(D) by default."""

    scale: float | None = None

    def __post_init__(self) -> None:
        score_scale(self.scale, 1)

    def __call__(self, q: Tensor, k: Tensor) -> Kernel:
        """Compare all queries with all keys."""
        scale = score_scale(self.scale, q.shape[-1])
        return Kernel(q.new_ones(()), scale * _products(q, k))


@dataclass(frozen=True)
class Rbf:
    """kappa = exp(-scale |q - k|^2), with scale = 1/sqrt(D) by default."""

    scale: float | None = None
    shift_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scale is not None:
            check_above_zero(scale=self.scale)  # so that closer keys weigh more

    def __call__(self, q: Tensor, k: Tensor) -> Kernel:
        """Compare all queries with all keys, in fp64 where the device has it: large vectors nearly cancel."""
        scale = score_scale(self.scale, q.shape[-1])
        dtype, exact = q.dtype, exact_dtype(q.device)
        q, k = q.to(exact), k.to(exact)
        q_norm, k_norm = (x.square().sum(-1).transpose(1, 2) for x in (q, k))
        distance = q_norm.unsqueeze(-1) + k_norm.unsqueeze(-2) - 2 * _products(q, k)
        return Kernel(q.new_ones((), dtype=dtype), (-scale * distance).to(dtype))


@dataclass(frozen=True)
class Polynomial:
    """kappa = (q . k + offset)^degree, which may be negative for odd degrees."""

    degree: int = 2
    offset: float = 1.0

    def __post_init__(self) -> None:
        check_integers(1, degree=self.degree)
        check_finite(offset=self.offset)

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare all queries with all keys."""
        return (_products(q, k) + self.offset) ** self.degree


@dataclass(frozen=True)
class DotProduct:
    """kappa = q . k, which may be negative."""

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare all queries with all keys."""
        return _products(q, k)


SIMILARITIES: dict[str, Callable[..., Similarity]] = {
    "exp": Exponential,
    "rbf": Rbf,
    "polynomial": Polynomial,
    "linear": DotProduct,
}


def similarity_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    similarity: Similarity,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Average the values by the kernel of queries and keys, computed by the definition above.

    Args:
        q: queries `[B,T,H,D]`.
        k: keys `[B,S,G,D]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        similarity: the kernel, called once with k of H heads.
        causal: query i attends to keys up to i + S - T only.
        key_padding_mask: `[B,S]`, True = padding.
        attn_mask: broadcastable to `[B,H,T,S]`; boolean (True = attend) or the logarithm of a second
            kernel.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1, T = S).

    Returns:
        `o [B,T,H,M]`, in the dtype of `v`; 0, with zero gradient, for a query that has nothing to attend to.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    (B, T, H, _), (_, S, G, _) = q.shape, v.shape
    allowed = causal_mask(T, S, q.device) if causal else q.new_ones(T, S, dtype=torch.bool)
    k, v = zero_padding(key_padding_mask, k, v)
    if key_padding_mask is not None:
        allowed = allowed & ~key_padding_mask[:, None, None, :]
    if cu_seqlens is not None:
        allowed = allowed & packed_mask(cu_seqlens, T)
    if attn_mask is not None:
        check_attn_mask(attn_mask, (B, H, T, S))
        allowed = allowed & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > -math.inf)
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    with without_autocast(q.device):
        queries = q.to(dtype)
        keys, values = (x.to(dtype).repeat_interleave(H // G, 2) for x in (k, v))
        if S == 0:  # zeros, which autograd can go through
            return (_products(queries, keys) @ values.transpose(1, 2)).transpose(1, 2).to(v.dtype)
        if getattr(similarity, "shift_invariant", False):
            queries, keys = _without_offset(queries, keys, key_padding_mask, cu_seqlens)
        kernel = similarity(queries, keys)
        factor, exponent = kernel if isinstance(kernel, Kernel) else (kernel, keys.new_zeros(()))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            exponent = exponent + attn_mask.to(dtype).masked_fill(attn_mask == -math.inf, 0)
        exponent = torch.where(allowed, exponent, -math.inf)
        # A factor common to all keys of a query cancels; this one keeps the largest exponential at 1.
        largest = exponent.amax(-1, keepdim=True).detach()
        weights = factor * (exponent - largest.masked_fill(largest == -math.inf, 0)).exp()
        o = safe_divide(weights @ values.transpose(1, 2), weights.sum(-1, keepdim=True))
        return o.transpose(1, 2).to(v.dtype)


class SimilarityAttention(CachedAttention):
    """Multi-head similarity attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        similarity: "exp", "rbf", "polynomial", "linear", or a function of q and k as in `Similarity`.
        similarity_options: further arguments of the similarity of that name, such as `{"degree": 4}`.
        symmetric: project queries with the weights of the keys; n_kv_heads must then be n_heads.

    Raises:
        ValueError: an unknown similarity, options that do not fit it, or fewer key than query heads if
            symmetric.
    """

    supports = GENERAL.but(recurrence="growing", attn_mask=True, sequence=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        similarity: str | Similarity = "exp",
        similarity_options: Mapping[str, float | None] | None = None,
        symmetric: bool = False,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        if isinstance(similarity, str):
            if similarity not in SIMILARITIES:
                known = ", ".join(SIMILARITIES)
                raise ValueError(f"similarity is {similarity!r}, but must be one of {known}, or a function")
            try:
                similarity = SIMILARITIES[similarity](**(similarity_options or {}))
            except TypeError as error:
                raise ValueError(f"similarity_options {similarity_options} do not fit: {error}") from error
        elif similarity_options is not None:
            raise ValueError("similarity_options are for a similarity given by name, not for a function")
        if not callable(similarity):
            raise ValueError(f"similarity is {similarity!r}, but must be a name or a function of q and k")
        self.similarity, self.symmetric = similarity, symmetric
        if symmetric:
            if self.n_kv_heads != n_heads:
                found = self.n_kv_heads
                raise ValueError(f"n_kv_heads is {found}, but must be n_heads = {n_heads} if symmetric")
            self.qkv_proj = Linear(d_model, sum(self.widths[1:]), bias=self.qkv_proj.bias is not None)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k = self.rotated(heads)
        return similarity_attention(q, k, heads.v, self.similarity, causal=self.causal, **masks._asdict())

    def prefill_heads(
        self, heads: Heads[None], state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend in parallel to the cache and to the new tokens."""
        attend = partial(similarity_attention, similarity=self.similarity)
        return attend_to_cache(attend, *self.rotated(heads), heads.v, state, key_padding_mask)

    def step_heads(self, heads: Heads[None], state: KVCache) -> tuple[Tensor, KVCache]:
        """Attend from one token to the whole cache."""
        positions = None if heads.positions is None else heads.positions.unsqueeze(1)
        q, k, v = (x.unsqueeze(1) for x in heads[:3])
        token: Heads[None] = Heads(q, k, v, positions)
        o, state = self.prefill_heads(token, state, None)
        return o.squeeze(1), state

    def project(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Projected:
        """Project to queries, keys and values; if symmetric, queries by the projection of the keys."""
        if not self.symmetric:
            return super().project(query, key, value)
        key = query if key is None else key
        of_keys, of_values = (partial(linear_part, self.qkv_proj, self.widths[1:], i) for i in (0, 1))
        q = of_keys(query)
        k = q if key is query else of_keys(key)
        v = of_values(key if value is None else value)
        q, k = (torch.unflatten(x, -1, (self.n_heads, self.head_dim)) for x in (q, k))
        return q, k, torch.unflatten(v, -1, (self.n_heads, self.value_dim))


def _without_offset(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Subtract the first valid key of each sequence, which no causal query precedes, from queries and keys.

    The mean of the keys would do as well, but it depends on later keys.
    """
    if cu_seqlens is not None:
        first = cu_seqlens.long()[segment_ids(cu_seqlens, k.shape[1])].unsqueeze(0)
    elif key_padding_mask is not None:
        first = key_padding_mask.int().argmin(1, keepdim=True)
    else:
        first = torch.zeros(k.shape[0], 1, dtype=torch.long, device=k.device)
    # The kernel does not depend on what is subtracted, so no gradient flows through it.
    origin = k.detach().gather(1, first[:, :, None, None].expand(-1, -1, *k.shape[2:]))
    return q - origin, k - origin


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return q . k of every query and key: `[B,T,H,D]`, `[B,S,H,D]` to `[B,H,T,S]`."""
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
