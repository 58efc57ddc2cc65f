r"""The library's own operators in standard operations, since an exported graph cannot contain C++ kernels.

`torch.export` keeps each of these operators as one node. Here, they are written in operations that every
runtime has, and a model is traced with these in their place. They process all T tokens of a call at once, in
time and memory quadratic in T. Calls are short: a long prompt is split into several calls, with the state
passed from one to the next.

    P = (Q K^T) * D        o = (P V + exp(b) Q S) / (P 1 + exp(b) Q z)
    S' = exp(b_T) S + (exp(b_T - b) K)^T V        z' = exp(b_T) z + (exp(b_T - b) K)^T 1

with b the cumulative sum of the log gates, and D_ij = exp(b_i - b_j) for i >= j; without gates, b = 0.
Bidirectional attention, in models that read a whole sequence at once, has no state:
o = Q (K^T V) / Q (K^T 1).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unrolled.contract import UnsupportedError
from unrolled.ops.conv import operator as _conv
from unrolled.ops.conv import plain
from unrolled.ops.feature_maps.elementwise import ELEMENTWISE
from unrolled.ops.linear import operator as _linear
from unrolled.ops.linear.chunked import LOWEST_GATE
from unrolled.ops.window import operator as _window
from unrolled.ops.wkv.plain import FASTEST

PACKS = "an exported graph reads rows of one sequence each, not packs (cu_seqlens)"

Forms = dict[Callable[..., object], Callable[..., object]]


class InPlace(TorchFunctionMode):
    """While it is entered, calls of a function of torch, or of an operator, call its form instead.

    To replace the operators in a traced program (`run_decompositions`) would trace it once more, which takes
    as long as the trace itself.
    """

    def __init__(self, forms: Forms) -> None:
        super().__init__()
        self.forms = forms

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        return self.forms.get(func, func)(*args, **(kwargs or {}))


def portable() -> Forms:
    """Return the forms in standard operations, by the function or operator that each replaces."""
    return {
        _linear._operator: _of_a_call(linear_attention),
        _window._operator: window_attention,
        _conv._operator: causal_conv,
        torch.ops.unrolled.wkv.default: wkv,
        torch.nn.functional.logsigmoid: log_sigmoid,
    }


def fused() -> Forms:
    """Return the same forms, but with ONNX Runtime's own operator for linear attention."""
    return {**portable(), _linear._operator: _of_a_call(fused_linear_attention)}


LinearCall = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, bool]
"""q, k, v, log_decay, kv, k_sum and normalize of a call of `unrolled::linear_attention` from a state."""
LinearResult = tuple[Tensor, Tensor, Tensor, Tensor]
"""o, kv, k_sum and the denominators."""


def _of_a_call(form: Callable[[LinearCall], LinearResult]) -> Callable[..., LinearResult]:
    """Give a causal form the signature of the operator; bidirectional calls take the bidirectional form."""

    def operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        kv: Tensor | None,
        k_sum: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
        normalize: bool,
        feature_map: str | None,
        backend: str | None,
    ) -> LinearResult:
        if cu_seqlens is not None:
            raise UnsupportedError(PACKS)
        if feature_map is not None:
            phi = ELEMENTWISE[feature_map].function
            q, k = phi(q), phi(k)
        if not causal and kv is None and log_decay is None:
            return bidirectional_linear_attention(q, k, v, normalize)
        if not causal or kv is None or k_sum is None:
            raise UnsupportedError(
                "linear attention in a graph is causal from a state, or bidirectional without state and gates"
            )
        return form((q, k, v, log_decay, kv, k_sum, normalize))

    return operator


def linear_attention(call: LinearCall) -> LinearResult:
    """Compute the operator `unrolled::linear_attention`, causally and from a state (see above)."""
    q, k, v, log_decay, kv, k_sum, normalize = call
    share = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B,H,T,R], [B,G,T,R], [B,G,T,M]
    # gates of each key up to the last token, and of the state over all tokens
    k_to_end, through = k, None
    if log_decay is not None:
        b = log_decay.clamp(min=LOWEST_GATE).transpose(1, 2).cumsum(-1).unsqueeze(-1)  # [B,G,T,1]
        k_to_end, through = k * (b[:, :, -1:] - b).exp().to(k.dtype), b[:, :, -1:].exp().to(k.dtype)
        b = _per_query_head(b, share)
    # P = (Q K^T) * D
    weights = q @ _per_query_head(k, share).mT
    q_from_start = q
    if log_decay is None:
        weights = weights.tril()
    else:
        behind = torch.ones_like(weights[:1, :1]).tril() == 0
        weights = weights * (b - b.mT).masked_fill(behind, -math.inf).exp().to(q.dtype)
        q_from_start = q * b.exp().to(q.dtype)
    o = weights @ _per_query_head(v, share) + q_from_start @ _per_query_head(kv, share)
    den = q.new_empty(0)
    if normalize:
        den = weights.sum(-1, keepdim=True) + q_from_start @ _per_query_head(k_sum, share).unsqueeze(-1)
        o = _divide(o, den)
        den = den.transpose(1, 2).contiguous()
    if through is not None:
        kv, k_sum = kv * through, k_sum * through.squeeze(-1)
    kv, k_sum = kv + k_to_end.mT @ v, k_sum + k_to_end.sum(2)
    return o.transpose(1, 2).contiguous(), kv, k_sum, den


def bidirectional_linear_attention(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> LinearResult:
    """Compute the operator `unrolled::linear_attention` when every query reads all keys."""
    share = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B,H,T,R], [B,G,S,R], [B,G,S,M]
    kv, k_sum = k.mT @ v, k.sum(2)
    o, den = q @ _per_query_head(kv, share), q.new_empty(0)
    if normalize:
        den = q @ _per_query_head(k_sum, share).unsqueeze(-1)
        o = _divide(o, den)
        den = den.transpose(1, 2).contiguous()
    return o.transpose(1, 2).contiguous(), kv, k_sum, den


def fused_linear_attention(call: LinearCall) -> LinearResult:
    """Compute the same by `com.microsoft.LinearAttention`; with values (v, 1), z is one more column of S."""
    q, k, v, log_decay, kv, k_sum, normalize = call
    if not normalize or log_decay is not None:
        raise UnsupportedError(
            "the fused graph is for linear attention with normalizer 'sum', without gates and rotary "
            "positions; export the plain graph"
        )
    (B, T, H, _), (_, _, G, M) = q.shape, v.shape
    state = torch.cat([kv, k_sum.unsqueeze(-1)], -1)
    values = torch.nn.functional.pad(v, (0, 1), value=1.0)
    sums, state = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (q.flatten(2), k.flatten(2), values.flatten(2), state),
        {"q_num_heads": H, "kv_num_heads": G, "update_rule": "linear", "scale": 1.0},
        dtypes=(q.dtype, q.dtype),
        shapes=((B, T, H * (M + 1)), tuple(state.shape)),
        version=1,
    )
    num, den = sums.reshape(B, T, H, M + 1).split_with_sizes((M, 1), -1)
    kv, sum_after = state.split_with_sizes((M, 1), -1)
    o, k_sum = _divide(num, den), sum_after.squeeze(-1)
    return o.contiguous(), kv.contiguous(), k_sum.contiguous(), den.contiguous()


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    left: int,
    right: int,
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Compute the operator `unrolled::window_attention`, with the scores of all pairs."""
    if cu_seqlens is not None:
        raise UnsupportedError(PACKS)
    T, S, share = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ahead = torch.arange(S, device=q.device) - (torch.arange(T, device=q.device).unsqueeze(1) + (S - T))
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        allowed = allowed & (ahead >= -left)
    if right >= 0:
        allowed = allowed & (ahead <= right)
    allowed = allowed[None, None]
    if key_padding_mask is not None:
        allowed = allowed & ~key_padding_mask[:, None, None, :]
    scores = (q * scale) @ _per_query_head(k, share).mT
    scores = scores.masked_fill(~allowed, -math.inf)
    nothing = ~allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    o = weights @ _per_query_head(v, share)
    lse = scores.logsumexp(-1)
    return o.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Compute the operator `unrolled::causal_conv`."""
    if cu_seqlens is not None:
        raise UnsupportedError(PACKS)
    return plain.forward(x, weight, bias, state, silu=silu)


def wkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the operator `unrolled::wkv` from a state, with the weights of all pairs of tokens."""
    if key_padding_mask is not None or cu_seqlens is not None or state is None:
        raise NotImplementedError("this form of wkv starts from a state, and has neither padding nor packs")
    num, den, top = state.unsqueeze(1).unbind(2)  # [B,1,C]
    d = log_decay.clamp(min=FASTEST)
    # The sums before the token after the last are the next state.
    number = torch.arange(k.shape[1] + 1, device=k.device, dtype=k.dtype).unsqueeze(1)
    apart = number.unsqueeze(1) - number[:-1]  # [T+1,T,1], of a token and one that it reads
    exponents = k.unsqueeze(1) + torch.where(apart == 0, bonus, (apart - 1) * d)
    exponents, of_state = exponents.masked_fill(apart < 0, -math.inf), top + number * d
    peak = torch.maximum(exponents.amax(2), of_state)
    weights, kept = (exponents - peak.unsqueeze(2)).exp(), (of_state - peak).exp()
    num, den = kept * num + (weights * v.unsqueeze(1)).sum(2), kept * den + weights.sum(2)
    after = torch.cat([num[:, -1:], den[:, -1:], peak[:, -1:]], dim=1)
    return (num / den)[:, :-1], after


def log_sigmoid(x: Tensor) -> Tensor:
    """Compute log sigmoid(x) without underflow: log of the sigmoid would be -inf for very negative x."""
    return x.clamp(max=0) - x.abs().neg().exp().log1p()


def _per_query_head(x: Tensor, share: int) -> Tensor:
    if share == 1:
        return x
    heads = torch.arange(x.shape[1] * share, device=x.device) // share
    return x.index_select(1, heads)  # `repeat_interleave` would make torch's exporter fix T in a window


def _divide(num: Tensor, den: Tensor) -> Tensor:
    """num / den, or 0 where den is too small to divide by, as in `safe_divide`."""
    kind = torch.finfo(den.dtype)
    return num / den.masked_fill(den.abs() < kind.tiny / kind.eps, math.inf)
