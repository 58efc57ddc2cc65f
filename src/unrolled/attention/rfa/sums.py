"""Attention by features of queries and keys, with gates: whole sequences and one token."""

from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unrolled.attention._heads import KeyMasks
from unrolled.ops.checks import check_cu_seqlens, check_key_padding_mask
from unrolled.ops.linear import Keys, LinearOptions, LinearState, linear_attention, linear_attention_step
from unrolled.ops.masks import without_padding
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.random_features import signed_linear_attention, signed_linear_attention_step


class RfaSums(NamedTuple):
    """S `[B,G,R,M]`, z `[B,G,R]`, and the sum of the factors (1 - g_j) g_{j+1} ... g_i, `[B,G]`.

    The sum of the factors is 1 without a gate.
    """

    kv: Tensor
    k_sum: Tensor
    weight: Tensor


def rfa_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, gate_logits: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute the definition with its weights `[B,H,T,S]`, for T = S and `k`, `v` of H heads.

    Arguments are those of `rfa_attention`. Gated, key j has the weight (1 - g_j) g_{j+1} ... g_i.
    """
    weights = torch.einsum("bthr,bshr->bhts", q, k)
    if gate_logits is not None:
        b = logsigmoid(gate_logits).cumsum(1).transpose(1, 2)
        weights = weights * (b.unsqueeze(-1) - b.unsqueeze(-2)).exp()
        weights = weights * torch.sigmoid(-gate_logits).transpose(1, 2).unsqueeze(-2)
    if causal:
        weights = weights.tril()
    return torch.einsum("bhts,bshm->bthm", weights / weights.sum(-1, keepdim=True), v)


class RfaOptions(KeyMasks, total=False):
    """Options of `rfa_attention`."""

    gate_logits: Tensor | None
    causal: bool
    state: RfaSums | None


def rfa_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[RfaOptions]) -> tuple[Tensor, RfaSums]:
    """Attend by features `q [B,T,H,R]`, `k [B,S,G,R]`, whose products are not negative, to `v [B,S,G,M]`.

    Args:
        q, k, v: as for `linear_attention`.
        options: `gate_logits [B,S,G]`, whose sigmoid is the gates; None for no gate. The masks, `causal` and
            `state` are as for `linear_attention`.

    Returns:
        `o [B,T,H,M]`, and the sums after the last key.
    """
    return _attend(_unsigned, q, k, v, **options)


def signed_rfa_attention(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[RfaOptions]
) -> tuple[Tensor, RfaSums]:
    """Attend as `rfa_attention` does, but by features whose products may be negative.

    The absolute value of a divisor is at least a millionth of the total weight of the keys.
    """
    return _attend(signed_linear_attention, q, k, v, **options)


def _unsigned(
    q: Tensor, k: Tensor, v: Tensor, *, weight: Tensor | None, **options: Unpack[LinearOptions]
) -> tuple[Tensor, LinearState]:
    return linear_attention(q, k, v, return_state=True, **options)


def _attend(
    attend: Callable[..., tuple[Tensor, LinearState]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gate_logits: Tensor | None = None,
    state: RfaSums | None = None,
    **options: Unpack[Keys],
) -> tuple[Tensor, RfaSums]:
    key_padding_mask, cu_seqlens = options.get("key_padding_mask"), options.get("cu_seqlens")
    if key_padding_mask is not None and gate_logits is not None:
        check_key_padding_mask(key_padding_mask, *k.shape[:2])
        k, gate_logits = (without_padding(x, key_padding_mask) for x in (k, gate_logits))
    keys, log_decay = gated(k, gate_logits)
    options["log_decay"] = log_decay
    if gate_logits is None:
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, q, k)
        N = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        weights, total = None, k.new_ones(N, k.shape[2], dtype=accumulation_dtype(k.dtype, v.dtype))
    else:
        weights, total = gate_weights(q.shape[1], gate_logits.to(k.dtype), state, options)
        weights = weights.repeat_interleave(q.shape[2] // k.shape[2], -1)
    before = None if state is None else LinearState(state.kv, state.k_sum)
    o, after = attend(q, keys, v, state=before, weight=weights, **options)
    return o, RfaSums(*after, total)


def rfa_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: RfaSums, *, gate_logits: Tensor | None = None
) -> tuple[Tensor, RfaSums]:
    """Run one token of `rfa_attention`: `q [B,H,R]`, `k [B,G,R]`, `v [B,G,M]`, `gate_logits [B,G]`."""
    keys, log_decay, total = _gate_step(k, state, gate_logits)
    o, after = linear_attention_step(q, keys, v, LinearState(*state[:2]), log_decay=log_decay)
    return o, RfaSums(*after, total)


def signed_rfa_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: RfaSums, *, gate_logits: Tensor | None = None
) -> tuple[Tensor, RfaSums]:
    """Run one token of `signed_rfa_attention`; shapes as in `rfa_attention_step`."""
    keys, log_decay, total = _gate_step(k, state, gate_logits)
    weight, before = total.repeat_interleave(q.shape[1] // k.shape[1], -1), LinearState(*state[:2])
    o, after = signed_linear_attention_step(q, keys, v, before, log_decay=log_decay, weight=weight)
    return o, RfaSums(*after, total)


def _gate_step(k: Tensor, state: RfaSums, gate_logits: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (1 - g) phi(k), log g, and the new sum of factors."""
    total = state.weight
    if gate_logits is not None:
        logits = gate_logits.to(total.dtype)
        total = total * torch.sigmoid(logits) + torch.sigmoid(-logits)
    return *gated(k, gate_logits), total


def gated(k: Tensor, gate_logits: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return (1 - g) phi(k), and log g."""
    if gate_logits is None:
        return k, None
    gate_logits = gate_logits.to(k.dtype)
    return k * torch.sigmoid(-gate_logits).unsqueeze(-1), logsigmoid(gate_logits)


def gate_weights(T: int, gate_logits: Tensor, state: RfaSums | None, options: Keys) -> tuple[Tensor, Tensor]:
    """Return w_i = g_i w_{i-1} + 1 - g_i, as each of T queries reads it, `[B,T,G]`, and the last `[B,G]`."""
    new = torch.sigmoid(-gate_logits).unsqueeze(-1)
    before = None
    if state is not None:
        weight = state.weight.unsqueeze(-1)
        before = LinearState(weight.unsqueeze(-1), weight)
    ones, queries = torch.ones_like(new), new.new_ones(new.shape[0], T, *new.shape[2:])
    w, after = linear_attention(
        queries, new, ones, state=before, return_state=True, normalize=False, **options
    )
    return w.squeeze(-1), after.k_sum.squeeze(-1)
