"""Causal window attention as a recurrence: the state is the last keys and values, those in the window.

The window of dilation d reads the token itself and the tokens d, 2 d ... left d before it. With the keys in
order, the newest last, these are a slice with steps of d.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.checks import check_key_padding_mask, check_qkv, check_step, shape
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.precision import without_autocast
from unrolled.ops.window.dilated import dilated_window_attention, runs


class WindowState(NamedTuple):
    """The last R keys and values of each row, the newest last.

    R is the reach of the window, left times the largest dilation. If a row has fewer tokens, the
    first places are zeros and masked.
    """

    k: Tensor  # [B,G,R,D]
    v: Tensor  # [B,G,R,M]
    position: Tensor  # [B], valid tokens seen


def empty_window(
    batch_size: int, reach: int, n_kv_heads: int, head_dim: int, value_dim: int, like: Tensor
) -> WindowState:
    """Make an empty state with the device and dtype of `like`."""
    k = like.new_zeros(batch_size, n_kv_heads, reach, head_dim)
    v = like.new_zeros(batch_size, n_kv_heads, reach, value_dim)
    return WindowState(k, v, torch.zeros(batch_size, dtype=torch.long, device=like.device))


def window_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: WindowState,
    *,
    left: int,
    dilation: Sequence[int],
    key_padding_mask: Tensor | None = None,
) -> tuple[Tensor, WindowState]:
    """Attend from `q [B,T,H,D]` to the state and to new keys and values of the same T tokens.

    Padded tokens (`key_padding_mask [B,T]`, True = padding) are removed: they have no position.

    Returns:
        `o [B,T,H,M]`, and the state after the new tokens.
    """
    check_qkv(q, k, v)
    _check_state(state, k, v, left, dilation)
    (B, T), dtype, out_dtype = k.shape[:2], state.k.dtype, v.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    back, padding = None, torch.zeros(B, T, dtype=torch.bool, device=k.device)
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, B, T)
        (q, k, v), padding, back = valid_tokens_first(key_padding_mask, q, k, v)
    R = state.k.shape[2]
    place = torch.arange(R, device=k.device)
    unwritten = place < R - state.position.unsqueeze(1)
    keys = torch.cat([state.k.transpose(1, 2), k], 1)
    values = torch.cat([state.v.transpose(1, 2), v], 1)
    masked = torch.cat([unwritten, padding], 1)
    o, _ = dilated_window_attention(
        q, keys, values, window_size=(left, 0), dilation=dilation, key_padding_mask=masked
    )
    seen = (~padding).sum(1)
    if back is None:
        last_k, last_v = keys[:, T:], values[:, T:]
    else:
        last = (seen.unsqueeze(1) + place)[:, :, None, None]
        last_k, last_v = (x.gather(1, last.expand(-1, -1, *x.shape[2:])) for x in (keys, values))
        o = back(o)
    # Copies: a slice would keep all keys of a long prompt in memory.
    copied = torch.contiguous_format
    last_k, last_v = (x.transpose(1, 2).clone(memory_format=copied) for x in (last_k, last_v))
    return o.to(out_dtype), WindowState(last_k, last_v, state.position + seen)


def window_step(
    q: Tensor, k: Tensor, v: Tensor, state: WindowState, *, left: int, dilation: Sequence[int]
) -> tuple[Tensor, WindowState]:
    """One token: append the key `[B,G,D]` and value `[B,G,M]`, then attend from the query `[B,H,D]`.

    Returns:
        `o [B,H,M]`, and the new state, without the oldest key and value.
    """
    check_step(q, k, v)
    _check_state(state, k.unsqueeze(1), v.unsqueeze(1), left, dilation)
    B, _, D = q.shape
    keys = torch.cat([state.k, k.unsqueeze(2).to(state.k.dtype)], 2)
    values = torch.cat([state.v, v.unsqueeze(2).to(state.v.dtype)], 2)
    R = state.k.shape[2]
    age = torch.arange(R, -1, -1, device=q.device)
    unwritten = (age > state.position.unsqueeze(1))[:, None, None, :]
    parts = []
    with without_autocast(q.device):
        q = q.to(keys.dtype) * D**-0.5
        for d, heads, kv_heads in runs(dilation, k.shape[1]):
            read = slice(R - left * d, None, d)
            near_k, near_v = keys[:, kv_heads, read], values[:, kv_heads, read]
            share = (heads.stop - heads.start) // near_k.shape[1]
            scores = q[:, heads].reshape(B, near_k.shape[1], share, D) @ near_k.mT
            weights = scores.masked_fill(unwritten[..., read], -torch.inf).softmax(-1)
            parts.append((weights @ near_v).flatten(1, 2))
    o = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return o.to(v.dtype), WindowState(keys[:, :, 1:], values[:, :, 1:], state.position + 1)


def _check_state(state: WindowState, k: Tensor, v: Tensor, left: int, dilation: Sequence[int]) -> None:
    (B, _, G, D), M, R = k.shape, v.shape[3], left * max(dilation)
    for name, expected in (("k", [B, G, R, D]), ("v", [B, G, R, M]), ("position", [B])):
        if (found := shape(getattr(state, name))) != expected:
            raise ValueError(f"state.{name} has shape {found}, but must be {expected}")
