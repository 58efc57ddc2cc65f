r"""The weighted averages of attention free transformers.

    o_t = sum_j exp(k_j + w_tj) v_j / sum_j exp(k_j + w_tj)        element by element of k_j and v_j

Only the definition makes tensors of size [T,S,D]. Biases w_tj are nonzero inside a window only, |t - j| < s.
All terms of all sums are positive, so that no digits are lost. The shorter formula, "all keys, plus exp(w) -
1 times those in the window", would subtract.

Keys outside the window: sums that grow by one key per step. They are scaled by exp(-m_t) with the running
maximum m_t = max_{j <= t} k_j, and follow S_t = exp(m_{t-1} - m_t) S_{t-1} + exp(k_t - m_t) [v_t, 1].

Keys inside it: exp(w) exp(k) is a matrix product, but exp(k_j - m_t) depends on both t and j, and m_t cannot
be replaced by a constant where the keys rise steeply. So the pairs j < t are split into halves, halves of
halves and so on: the keys of a left half, scaled by the maximum at its end, are combined with the queries of
the right half, whose own maximum is no lower. All factors are at most 1, none depends on tokens after t, and
each pair is computed once.

The factors exp(k) and exp(bias) are scaled by their own maxima, which may be at different keys. Where biases
differ by more than 60 (in fp32), all products of scaled factors could vanish, and the definition is computed
instead. This check reads the values of the biases, which it does only on a CPU and outside of torch.compile;
elsewhere such averages lose digits. The definition is also the fastest form for a few tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.ops.linear.chunked import safe_divide
from unrolled.ops.observing import may_read
from unrolled.ops.scan import linear_scan
from unrolled.ops.wkv import wkv
from unrolled.ops.wkv.plain import LOWEST

FEW = 16  # tokens

Pairs = tuple[Tensor, Tensor]
"""Rows `[n,r]` and keys `[n,c]`: n blocks of all pairs of r rows and c keys."""


Bias = Callable[[Tensor, Tensor], Tensor]
"""From positions `[B,n,r]` of rows and `[B,n,c]` of keys to biases `[B,n,H,r,c]`, where H may be 1."""


class Keys(NamedTuple):
    """What is averaged: keys, values, which of them are valid, and their positions."""

    k: Tensor  # [B,L,H,K], K = M, or 1 for all elements of a value
    v: Tensor  # [B,L,H,M]
    valid: Tensor | None  # [B,L]
    positions: Tensor  # [B,L], or [1,L]


class OldSums(NamedTuple):
    """Sums over the keys that have left the window, times exp(-k_max)."""

    k_max: Tensor  # [B,H,K], or [B,L,H,K] after each of L keys
    sums: Tensor  # [B,H,2,M] of exp(k) v and of exp(k); or [B,L,H,2,M]


def average_reference(k: Tensor, v: Tensor, bias: Tensor, allowed: Tensor) -> Tensor:
    """Compute the averages by their definition, with the explicit weights `[B,H,T,S,K]`.

    Args:
        k: `[B,S,H,K]`.
        v: `[B,S,H,M]`.
        bias: w, broadcastable to `[B,H,T,S]`.
        allowed: which keys a query averages, broadcastable to `[B,H,T,S]`.

    Returns:
        `[B,T,H,M]`; 0 for a query without keys.
    """
    something = allowed.any(-1, keepdim=True)
    scores = k.transpose(1, 2).unsqueeze(2) + bias.unsqueeze(-1)
    scores = scores.masked_fill((something & ~allowed).unsqueeze(-1), -math.inf)
    weights = scores.softmax(3).masked_fill(~something.unsqueeze(-1), 0)
    return (weights * v.transpose(1, 2).unsqueeze(2)).sum(3).transpose(1, 2)


def average_causal(
    keys: Keys, bias: Bias, window: int, old: OldSums, first: int = 0
) -> tuple[Tensor, OldSums]:
    """Average, for each key from number `first` on, the `old` keys and all keys up to this one.

    Returns:
        `[B,L-first,H,M]`, and the sums over the old keys and the first 0, 1, ... new keys, up to the last
        new key that is outside the window of the next token. Without a window, only the last of these sums.
    """
    if window == 0:
        return _average_without_biases(keys, old)
    # Keys outside the window: a scan over the scaled sums.
    keys, k, values = _prepared(keys)
    L = k.shape[1]
    top = torch.maximum(k.detach().cummax(1).values, old.k_max.unsqueeze(1))
    leaving = max(0, L - window + 1)
    before = torch.cat([old.k_max.unsqueeze(1), top[:, :leaving]], dim=1)
    gates = (before[:, :-1] - before[:, 1:]).exp().unsqueeze(-2)
    added = (k - top)[:, :leaving].exp().unsqueeze(-2) * values[:, :leaving]
    gates = pad(gates, (0, 0, 0, 0, 0, 0, 1, 0))  # the first is not used
    passed = linear_scan(gates, torch.cat([old.sums.unsqueeze(1), added], dim=1))
    after = OldSums(before, passed)

    left = torch.arange(first, L, device=k.device) + 1 - window  # number of keys before each window
    far = passed.index_select(1, left.clamp(min=0)).masked_fill((left < 0).view(-1, 1, 1, 1), 0)
    far = far * (before.index_select(1, left.clamp(min=0)) - top[:, first:]).exp().unsqueeze(-2)
    # Keys inside the window, by halves or by the definition.
    if L <= FEW:
        return _explicit(keys, bias, window, old, True)[:, first:], after
    pairs = earlier_pairs(L, first, window, k.device)
    near, peak, too_far_apart = _near(k, values, top, bias, (keys.positions,) * 2, pairs, window)
    if too_far_apart:
        return _explicit(keys, bias, window, old, True)[:, first:], after
    far = far * (-peak).exp()[..., None, None]
    return _divided(near[:, first:] + far), after


def _average_without_biases(keys: Keys, old: OldSums) -> tuple[Tensor, OldSums]:
    """Average all keys so far, and the old ones: weighted averages without a decay."""
    k, v = keys.k.flatten(2), keys.v.flatten(2)
    zeros, padding = k.new_zeros(k.shape[2]), None if keys.valid is None else ~keys.valid
    state = torch.cat([old.sums.transpose(1, 2), old.k_max.unsqueeze(1)], dim=1)
    o, after = wkv(k, v, zeros, zeros, key_padding_mask=padding, state=state.flatten(2))
    after = after.view(state.shape).unsqueeze(1)
    return o.view(keys.v.shape), OldSums(after[:, :, 2], after[:, :, :2].transpose(2, 3))


def average_bidirectional(keys: Keys, bias: Bias, window: int) -> Tensor:
    """Average all keys for each of their positions: `[B,L,H,M]`."""
    keys, k, values = _prepared(keys)
    L = k.shape[1]
    if L <= FEW:
        return _explicit(keys, bias, window, None, False)
    top = k.detach().amax(1, keepdim=True)
    earlier = earlier_pairs(L, 0, window, k.device)
    pairs = earlier + [(right, left) for left, right in earlier[1:]]
    near, peak, too_far_apart = _near(k, values, top, bias, (keys.positions,) * 2, pairs, window)
    if too_far_apart:
        return _explicit(keys, bias, window, None, False)
    weighed = (k - top).exp().unsqueeze(-2) * values
    before = pad(weighed.cumsum(1), (0, 0, 0, 0, 0, 0, 1, 0))
    behind = pad(weighed.flip(1).cumsum(1).flip(1), (0, 0, 0, 0, 0, 0, 0, 1))
    place = torch.arange(L, device=k.device)
    far = before.index_select(1, (place + 1 - window).clamp(min=0))
    far = far + behind.index_select(1, (place + window).clamp(max=L))
    return _divided(near + far * (-peak).exp()[..., None, None])


def average_full(keys: Keys, bias: Bias, rows: Tensor) -> Tensor:
    """Average all keys, each with its bias, for rows at positions `[1,T]`: `[B,T,H,M]`."""
    keys, k, values = _prepared(keys)
    T, S = rows.shape[1], k.shape[1]
    if T * S > FEW * FEW:
        pairs = [(torch.arange(T, device=k.device)[None], torch.arange(S, device=k.device)[None])]
        top = k.detach().amax(1, keepdim=True)
        near, _, too_far_apart = _near(k, values, top, bias, (rows, keys.positions), pairs, T + S)
        if not too_far_apart:
            return _divided(near)
    w = bias(rows[:, None], keys.positions[:, None]).squeeze(1)
    return average_reference(keys.k, keys.v, w, counted(keys)[:, None, None])


def earlier_pairs(L: int, first: int, window: int, device: torch.device) -> list[Pairs]:
    """Cut the pairs of rows >= `first` with keys up to the row and inside the window into blocks.

    The first block pairs each row with itself. Then, for c = 1, 2, 4, ..., blocks pair the right half of
    every 2c tokens with the left half. Blocks may include rows after the last one, and pairs outside the
    window.
    """
    itself = torch.arange(first, L, device=device).unsqueeze(1)
    pairs, c = [(itself, itself)], 1
    while c < L and window > 1:
        reach = min(c, window - 1)
        skipped = max(0, (first - reach - c) // (2 * c) + 1)
        middle = torch.arange(c + 2 * c * skipped, max(L, c + 2 * c * skipped), 2 * c, device=device)
        rows = reach if len(middle) != 1 else min(reach, L - c - 2 * c * skipped)
        if len(middle):
            offset = torch.arange(reach, device=device)
            pairs.append((middle[:, None] + offset[:rows], middle[:, None] - reach + offset))
        c *= 2
    return pairs


def _near(
    k: Tensor, values: Tensor, top: Tensor, bias: Bias, positions: Pairs, pairs: list[Pairs], window: int
) -> tuple[Tensor, Tensor, bool]:
    """Sum over the window: `[B,R,H,2,M]` times exp(-peak - top), and `peak [B,1,H]`, the largest bias or 0.

    `positions` are those of the R rows and of the L keys. The third result says whether biases differ so much
    that these sums may have lost their digits; it is False where reading values would have a cost.
    """
    row_positions, key_positions = positions
    (B, L, H, _), R, M = k.shape, row_positions.shape[1], values.shape[-1]
    biases = []
    for rows, keys in pairs:
        w = bias(row_positions[:, rows.clamp(max=R - 1)], key_positions[:, keys.clamp(max=L - 1)])
        outside = (rows.unsqueeze(-1) - keys.unsqueeze(-2)).abs() >= window
        biases.append(w.masked_fill((outside | (keys >= L).unsqueeze(-2)).unsqueeze(1), -math.inf))
    total = k.new_zeros(B, R + 1, H, 2, M)
    with torch.no_grad():
        peak = torch.stack([w.amax((1, 3, 4)) for w in biases]).amax(0).clamp(min=0)[:, None, :, None, None]
        too_far_apart = may_read(peak) and any(_spread(w, peak) > _limit(k.dtype) for w in biases)
    for (rows, keys), w in zip(pairs, biases, strict=True):
        keys = keys.clamp(max=L - 1)
        reference = (top if top.shape[1] == 1 else top.index_select(1, keys[:, -1])).unsqueeze(2)
        weighed = (_take(k, keys) - reference).exp().unsqueeze(-2) * _take(values, keys)
        sums = torch.einsum("bnhrj,bnjhim->bnrhim", (w - peak).exp(), weighed)
        if top.shape[1] > 1:
            sums = sums * (reference - _take(top, rows.clamp(max=L - 1))).exp().unsqueeze(-2)
        # Rows after the last one are added to an extra row, which is dropped.
        total.index_add_(1, rows.clamp(max=R).flatten(), sums.flatten(1, 2))
    return total[:, :R], peak[:, :, :, 0, 0], too_far_apart


def _spread(w: Tensor, peak: Tensor) -> float:
    """Return the largest difference between the peak and a bias."""
    below = (peak - w).masked_fill(w == -math.inf, 0)
    return float(below.amax()) if below.numel() else 0.0


def _explicit(keys: Keys, bias: Bias, window: int, old: OldSums | None, causal: bool) -> Tensor:
    """Average by the definition for each key's position; the old keys are one more key without a bias."""
    L = keys.k.shape[1]
    place = torch.arange(L, device=keys.k.device)
    distance = place.unsqueeze(1) - place
    w = bias(keys.positions[:, None], keys.positions[:, None]).squeeze(1).to(keys.k.dtype)
    w = w.masked_fill(distance.abs() >= window, 0)
    allowed = counted(keys)[:, None, None] & ((distance >= 0) | (not causal))
    if old is None:
        return average_reference(keys.k, keys.v, w, allowed)
    k, v = with_old(keys.k, keys.v, old)
    return average_reference(k, v, pad(w, (1, 0)), pad(allowed, (1, 0), value=True))


def with_old(k: Tensor, v: Tensor, old: OldSums) -> tuple[Tensor, Tensor]:
    """Prepend one key and value `[B,1,H,...]`, equivalent to all old ones, to `k` and `v`."""
    num, den = old.sums.unbind(-2)
    total = den[..., : k.shape[-1]]
    k_old = old.k_max + total.clamp(min=torch.finfo(total.dtype).tiny).log()
    v = torch.cat([safe_divide(num, den).unsqueeze(1), v], dim=1)
    return torch.cat([k_old.unsqueeze(1), k], dim=1), v


def _prepared(keys: Keys) -> tuple[Keys, Tensor, Tensor]:
    """Return the keys, k and [v, 1] `[B,L,H,2,M]`, where invalid keys add nothing and have position 0."""
    k, v, valid, positions = keys
    values = torch.stack([v, torch.ones_like(v)], dim=-2)
    if valid is None:
        return keys, k, values
    k = k.masked_fill(~valid[..., None, None], LOWEST)
    values = values.masked_fill(~valid[..., None, None, None], 0)
    return keys._replace(positions=positions.masked_fill(~valid, 0)), k, values


def counted(keys: Keys) -> Tensor:
    """Return which keys are valid, `[B,L]`."""
    return keys.k.new_ones(keys.k.shape[:2], dtype=torch.bool) if keys.valid is None else keys.valid


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return `x [B,L,...]` at `index [n,c]`: `[B,n,c,...]`."""
    return x.index_select(1, index.flatten()).reshape(x.shape[0], *index.shape, *x.shape[2:])


def _divided(sums: Tensor) -> Tensor:
    return safe_divide(sums[..., 0, :], sums[..., 1, :])


def _limit(dtype: torch.dtype) -> float:
    """Return the difference of biases up to which products of factors, each at most 1, keep their digits."""
    return -0.7 * math.log(torch.finfo(dtype).tiny)
