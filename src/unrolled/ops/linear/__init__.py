r"""Linear attention: the recurrence S_t = a_t S_{t-1} + k_t v_t^T in all its forms.

With features q, k >= 0 (phi already applied), gates a_t = exp(log_decay_t) and the state (S, z),

    S_t = a_t S_{t-1} + k_t v_t^T        z_t = a_t z_{t-1} + k_t
    o_i = q_i^T S_p(i) / q_i^T z_p(i)

where p(i) is the last key that query i may read: when causal, i plus the number of keys minus the number of
queries (bottom-right aligned), otherwise the last key of all. Written out, the weight of key j for query i is
q_i . k_j exp(b_p(i) - b_j) with b = cumsum(log_decay), normalised over j.

Katharopoulos et al. 2020, "Transformers are RNNs" (arXiv 2006.16236), eq. 8-12 and 16-20. The gate is that of
RFA-Gate (Peng et al. 2021, arXiv 2103.02143), for which the caller also scales the keys by 1 - a_t.
"""

import math
from itertools import pairwise
from typing import Literal, NamedTuple, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from unrolled.ops.checks import (
    check_key_padding_mask,
    check_log_decay,
    check_qkv,
    check_state_tensor,
    check_step,
    wrong,
)
from unrolled.ops.feature_maps import FeatureMap
from unrolled.ops.feature_maps.elementwise import ELEMENTWISE
from unrolled.ops.linear import operator as kernels
from unrolled.ops.linear.chunked import LOWEST_GATE, Inputs, Options, Token, decay_between, safe_divide
from unrolled.ops.masks import without_padding
from unrolled.ops.options import check_booleans
from unrolled.ops.precision import accumulation_dtype, exact_dtype, promoted, without_autocast


class LinearState(NamedTuple):
    """The state of linear attention: `kv [B,G,R,M]` = S and `k_sum [B,G,R]` = z."""

    kv: Tensor
    k_sum: Tensor


class Keys(TypedDict, total=False):
    """Keyword arguments of `linear_attention` that say which keys a query attends to."""

    causal: bool
    log_decay: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None


class LinearOptions(Keys, total=False):
    """Keyword arguments of `linear_attention` and its definition."""

    state: LinearState | None
    normalize: bool


class _Mapped(LinearOptions, total=False):
    feature_map: FeatureMap | None


class _OutputOnly(_Mapped, total=False):
    return_state: Literal[False]
    backend: str | None


class _OutputAndState(_Mapped, total=False):
    return_state: Required[Literal[True]]
    backend: str | None


@overload
def linear_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[_OutputOnly]) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[_OutputAndState]
) -> tuple[Tensor, LinearState]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    log_decay: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    normalize: bool = True,
    feature_map: FeatureMap | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """Attention with weights q_i . k_j, in time and memory linear in the length.

    The equations are in `unrolled.ops.linear`.

    Args:
        q: query features `[B,T,H,R]`.
        k: key features `[B,S,G,R]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        causal: query i reads keys up to i + S - T only; otherwise every query reads all keys.
        log_decay: natural logarithm of the gates `[B,S,G]`, at most 0; minus infinity clears the state.
        key_padding_mask: `[B,S]`, True = padding: a padded key does not change the state, and its gate counts
            as 1.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1, T = S).
        state: the state before the first key, with N rows for `cu_seqlens`, else B.
        return_state: also return the state after the last key.
        normalize: divide by q_i . z; a query whose divisor is 0 (nothing to attend to) gets 0. If False, the
            output is a sum over all keys, which may overflow if `v` is fp16.
        feature_map: a map to apply to q and k, which then have the width D of a head instead of R. With
            `Elu`, `Relu` and `SquaredRelu`, no features are kept for the backward pass.
        backend: "triton", "native" for the C++ kernels of a CPU, or "plain" for the PyTorch form, for tests
            and benchmarks; None selects the fastest.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and with `return_state` the `LinearState`. Sums are kept in fp32
        (fp64 for fp64 inputs). Every input and both states have gradients of any order.

    Raises:
        ValueError: an argument of the wrong shape or type; decreasing offsets; a positive `log_decay`, which
            is only checked on a CPU in eager mode, where reading values is cheap.
    """
    check_booleans(causal=causal, normalize=normalize)
    q, k, phi = _apply(feature_map, q, k, key_padding_mask)
    k, v, log_decay = _check_and_mask(q, k, v, log_decay, key_padding_mask, cu_seqlens, state, phi)
    _check_width(None if phi is None else feature_map, k.shape[-1])
    out_dtype = v.dtype
    q, k, v = promoted(q, k, v)
    T, S = q.shape[1], k.shape[1]
    kv, k_sum = (None, None) if state is None else state
    before = []
    if causal and S > T:  # the keys before the first query only enter the state
        early, late = slice(None, S - T), slice(S - T, None)
        gates = None if log_decay is None else log_decay[:, early]
        inputs = Inputs(q[:, :0], k[:, early], v[:, early], gates, kv, k_sum)
        _, kv, k_sum = kernels.linear_attention(inputs, Options(None, False, normalize, phi), backend)
        log_decay = None if log_decay is None else log_decay[:, late]
        k, v = k[:, late], v[:, late]
    elif causal and T > S:  # the queries before the first key only read the given state
        inputs = Inputs(q[:, : T - S], k[:, :0], v[:, :0], None, kv, k_sum)
        before = [kernels.linear_attention(inputs, Options(None, False, normalize, phi), backend)[0]]
        q = q[:, T - S :]
    inputs = Inputs(q, k, v, log_decay, kv, k_sum)
    o, kv, k_sum = kernels.linear_attention(inputs, Options(cu_seqlens, causal, normalize, phi), backend)
    o = (torch.cat([*before, o], dim=1) if before else o).to(out_dtype)
    return (o, LinearState(kv, k_sum)) if return_state else o


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    log_decay: Tensor | None = None,
    normalize: bool = True,
    feature_map: FeatureMap | None = None,
) -> tuple[Tensor, LinearState]:
    """One token of the recurrence: the new key and value enter the state, then the query reads it.

    S' = a S + k v^T,  z' = a z + k,  o = q^T S' / q^T z'   (arXiv 2006.16236, eq. 18-20)

    Args:
        q: query features `[B,H,R]`.
        k: key features `[B,G,R]`.
        v: value `[B,G,M]`.
        state: `kv [B,G,R,M]`, `k_sum [B,G,R]`; it is not modified.
        log_decay: `[B,G]`, at most 0.
        normalize: divide by q . z'.
        feature_map: a map to apply to q and k, which then have the width D of a head instead of R.

    Returns:
        `o [B,H,M]` in the dtype of `v`, and the new state.

    Raises:
        ValueError: as `linear_attention`.
    """
    check_step(q, k, v)
    (B, G, D), M, R = k.shape, v.shape[2], k.shape[2]
    if feature_map is not None:
        R = feature_map.feature_dim
    _check_width(feature_map, D)
    check_state(state, (B, G, R, M), accumulation_dtype(q.dtype, k.dtype, v.dtype), k)
    if log_decay is not None:
        check_log_decay(log_decay, k, "[B, G]")
    o, kv, k_sum = kernels.linear_attention_step(Token(q, k, v, *state, log_decay), normalize, feature_map)
    return o, LinearState(kv, k_sum)


def linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: bool = False, **options: Unpack[_Mapped]
) -> Tensor | tuple[Tensor, LinearState]:
    """Compute `linear_attention` by its definition, with the explicit weights `[B,H,T,S]`.

    Quadratic in the length. Every other form must equal it; its gradients come from autograd. Arguments and
    results are those of `linear_attention`.
    """
    causal, normalize = options.get("causal", False), options.get("normalize", True)
    if (feature_map := options.get("feature_map")) is not None:
        q, k = _mapped(feature_map, q, k, options.get("key_padding_mask"))
    log_decay, cu_seqlens, state = options.get("log_decay"), options.get("cu_seqlens"), options.get("state")
    k, v, log_decay = _check_and_mask(q, k, v, log_decay, options.get("key_padding_mask"), cu_seqlens, state)
    kv, k_sum = (None, None) if state is None else state
    if cu_seqlens is None:
        o, after = _reference(Inputs(q, k, v, log_decay, kv, k_sum), causal, normalize)
        return (o, after) if return_state else o
    outs, states = [q[:, :0, :, :1].expand(-1, -1, -1, v.shape[3]).to(v.dtype)], [_zero_state(q, k, v, 0)]
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        tokens = (None if x is None else x[:, a:b] for x in (q, k, v, log_decay))
        row = (None if x is None else x[n : n + 1] for x in (kv, k_sum))
        o, after = _reference(Inputs._make([*tokens, *row]), causal, normalize)
        outs.append(o)
        states.append(after)
    o, after = torch.cat(outs, dim=1), LinearState._make(map(torch.cat, zip(*states, strict=True)))
    return (o, after) if return_state else o


def _reference(inputs: Inputs, causal: bool, normalize: bool) -> tuple[Tensor, LinearState]:
    q, k, v, log_decay, kv, k_sum = inputs
    B, T, H, _ = q.shape
    S, G = k.shape[1], k.shape[2]
    dtype, out_dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype), v.dtype
    with without_autocast(q.device):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if kv is None or k_sum is None:
            kv, k_sum = _zero_state(q, k, v, B)
        if log_decay is None:
            log_decay = q.new_zeros(B, S, G)
        # b[:, s] is the sum of the log gates of the first s keys; row 0 stands for "no key read yet".
        gates = log_decay.clamp(min=LOWEST_GATE).to(exact_dtype(q.device))
        b = torch.nn.functional.pad(gates.cumsum(1), (0, 0, 1, 0)).transpose(1, 2)
        keys_read = torch.arange(T, device=q.device) + (S - T + 1) if causal else q.new_full((T,), S).long()
        keys_read = keys_read.clamp(min=0)
        allowed = torch.arange(S, device=q.device) < keys_read.unsqueeze(-1)
        decay = decay_between(b[:, :, keys_read], b[:, :, 1:], allowed, dtype)
        from_start = b[:, :, keys_read].to(dtype).exp().repeat_interleave(H // G, 1)
        weights = torch.einsum("bthr,bshr->bhts", q, k.repeat_interleave(H // G, 2))
        weights = weights * decay.repeat_interleave(H // G, 1)
        o = torch.einsum("bhts,bshm->bthm", weights, v.repeat_interleave(H // G, 2))
        o = o + torch.einsum("bthr,bhrm,bht->bthm", q, kv.repeat_interleave(H // G, 1), from_start)
        if normalize:
            from_state = torch.einsum("bthr,bhr,bht->bht", q, k_sum.repeat_interleave(H // G, 1), from_start)
            o = safe_divide(o, (weights.sum(-1) + from_state).transpose(1, 2).unsqueeze(-1))
        to_end = decay_between(b[:, :, -1:], b[:, :, 1:], allowed.new_ones(1, S), dtype).squeeze(2)
        through = b[:, :, -1].to(dtype).exp()
        kv = kv * through[:, :, None, None] + torch.einsum("bsgr,bsgm,bgs->bgrm", k, v, to_end)
        k_sum = k_sum * through.unsqueeze(-1) + torch.einsum("bsgr,bgs->bgr", k, to_end)
        return o.to(out_dtype), LinearState(kv, k_sum)


def _zero_state(q: Tensor, k: Tensor, v: Tensor, batch: int) -> LinearState:
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    kv = k.new_zeros(batch, k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    return LinearState(kv, kv.new_zeros(kv.shape[:3]))


def _apply(
    feature_map: FeatureMap | None, q: Tensor, k: Tensor, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, str | None]:
    """Apply a map to q and k, or return its name if the operator can do that."""
    if feature_map is None:
        return q, k, None
    if not isinstance(feature_map, FeatureMap):
        raise wrong("feature_map", repr(feature_map), "a FeatureMap or None")
    for name, kind in ELEMENTWISE.items():
        if type(feature_map) is kind and not feature_map.replaced:
            return q, k, name
    return *_mapped(feature_map, q, k, key_padding_mask), None


def _mapped(
    feature_map: FeatureMap, q: Tensor, k: Tensor, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if key_padding_mask is not None:  # NaN at padding would pass through the gradient of the map
        check_key_padding_mask(key_padding_mask, *k.shape[:2])
        k = without_padding(k, key_padding_mask)
    return feature_map.phi_q(q), feature_map.phi_k(k)


def _check_width(feature_map: FeatureMap | None, width: int) -> None:
    if feature_map is not None and feature_map.head_dim != width:
        raise ValueError(f"feature_map takes heads {feature_map.head_dim} wide, but q and k are {width}")


def _check_and_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: LinearState | None,
    feature_map: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check every argument, then set the features of keys, values and log gates to 0 at padding."""
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    if log_decay is not None:
        check_log_decay(log_decay, k, "[B, S, G]", key_padding_mask)
    if state is not None:
        N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_state(state, (N, *k.shape[2:], v.shape[3]), accumulation_dtype(q.dtype, k.dtype, v.dtype), k)
    if key_padding_mask is not None:
        nothing = 0.0 if feature_map is None else -math.inf  # every map that the operator applies makes it 0
        k, v = without_padding(k, key_padding_mask, nothing), without_padding(v, key_padding_mask)
        log_decay = None if log_decay is None else without_padding(log_decay, key_padding_mask)  # a gate of 1
    return k, v, log_decay


def check_state(state: object, sizes: tuple[int, ...], dtype: torch.dtype, tokens: Tensor) -> None:
    """Require a state with `kv` of `sizes` [B,G,R,M] and `k_sum` [B,G,R], both of this dtype.

    They must be on the device of the tokens.
    """
    kv, k_sum = getattr(state, "kv", None), getattr(state, "k_sum", None)
    if kv is None or k_sum is None:
        raise ValueError(f"state is a {type(state).__name__}, but must be a LinearState")
    check_state_tensor("state.kv", kv, sizes, dtype, tokens)
    check_state_tensor("state.k_sum", k_sum, sizes[:3], dtype, tokens)
