"""Factorized attention one token at a time: the keys that later tokens may read, and the attention to them.

With the strided pattern, later tokens may read all keys; with the fixed pattern, those of the current block
and of the last c u tokens of each earlier block. A step gathers the keys that its token reads, and computes
no other scores.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention.sparse_transformer.factorized import Layout, factorized_attention
from unrolled.ops.checks import check_key_padding_mask, check_qkv, check_step, shape
from unrolled.ops.observing import may_read
from unrolled.ops.packing import reorder
from unrolled.ops.positions import positions_from_padding
from unrolled.ops.precision import without_autocast


class FactorizedState(NamedTuple):
    """The keys and values that later tokens may read. No function changes a state in place.

    Tokens are appended to a short `recent` part, and move from there to the `past`, where each position has a
    slot.
    """

    past_k: Tensor  # [B,P,G,D]
    past_v: Tensor  # [B,P,G,M]
    recent_k: Tensor  # [B,W,G,D]
    recent_v: Tensor  # [B,W,G,M]
    position: Tensor  # [B], valid tokens seen


STATE_GROWS = {"past_k": (1, "P"), "past_v": (1, "P"), "recent_k": (1, "W"), "recent_v": (1, "W")}


def empty_state(
    layout: Layout, batch_size: int, n_kv_heads: int, head_dim: int, value_dim: int, like: Tensor
) -> FactorizedState:
    """Make the state before the first token, on the device and in the dtype of `like`."""
    slots, _ = _slot_sizes(layout)
    k = like.new_zeros(batch_size, slots, n_kv_heads, head_dim)
    v = like.new_zeros(batch_size, slots, n_kv_heads, value_dim)
    position = torch.zeros(batch_size, dtype=torch.long, device=like.device)
    return FactorizedState(k, v, k[:, :0].clone(), v[:, :0].clone(), position)


def factorized_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    state: FactorizedState,
    *,
    key_padding_mask: Tensor | None = None,
) -> tuple[Tensor, FactorizedState]:
    """Attend from T new tokens to those of the state and to themselves: `[B,T,H,M]` and the state after them.

    Padding (`key_padding_mask [B,T]`, True) is never read or counted.
    """
    check_qkv(q, k, v)
    _check_state(layout, state, k, v)
    (B, T), out_dtype, dtype = q.shape[:2], v.dtype, state.past_k.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    W = state.recent_k.shape[1]
    base = (state.position - W).unsqueeze(1)
    order = torch.arange(T, device=q.device).expand(B, T)
    count: Tensor | int = T
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, B, T)
        order, count = positions_from_padding(key_padding_mask), (~key_padding_mask).sum(1)
    new = base + W + order
    if key_padding_mask is not None:
        new = torch.where(key_padding_mask, -1, new)
    position = torch.cat([base + torch.arange(W, device=q.device), new], 1)
    k, v = torch.cat([state.recent_k, k], 1), torch.cat([state.recent_v, v], 1)
    kept = _blocks_kept(layout, state.past_k) * layout.stride
    with without_autocast(q.device):
        if kept + W == 0 and key_padding_mask is None:
            o = factorized_attention(q, k, v, layout)
        else:
            n = kept + W + T
            all_k, all_v = (
                _scatter(_whole(layout, past, base.squeeze(1), n), x, position)
                for past, x in ((state.past_k, k), (state.past_v, v))
            )
            all_q = _scatter(q.new_zeros(B, n, *q.shape[2:]), q, new)
            o = factorized_attention(all_q, all_k, all_v, layout)
            o = o.gather(1, new.clamp(min=0)[..., None, None].expand(-1, -1, *o.shape[2:]))
    keep = (W + T) % _fold(layout) if key_padding_mask is None else 0
    return o.to(out_dtype), _add(layout, state, k, v, position, keep, count)


def factorized_step(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: FactorizedState
) -> tuple[Tensor, FactorizedState]:
    """Run one token: `q [B,H,D]`, `k [B,G,D]`, `v [B,G,M]` to `o [B,H,M]` and the state after it."""
    check_step(q, k, v)
    _check_state(layout, state, k.unsqueeze(1), v.unsqueeze(1))
    (B, H, D), G, out_dtype, dtype = q.shape, k.shape[1], v.dtype, state.past_k.dtype
    k = torch.cat([state.recent_k, k.to(dtype).unsqueeze(1)], 1)
    v = torch.cat([state.recent_v, v.to(dtype).unsqueeze(1)], 1)
    W, query = k.shape[1] - 1, state.position.unsqueeze(1)
    position = query - W + torch.arange(W + 1, device=q.device)
    if layout.kind == "strided":
        parts = [_gathered(layout, state, k, v, position)]
    else:
        kept = _positions_kept(layout, state.past_k, query, position[:, :1])
        parts = [(state.past_k, state.past_v, kept), (k, v, position)]
    with without_autocast(q.device):
        grouped = q.to(dtype).reshape(B, G, H // G, D) * D**-0.5
        scores = [torch.einsum("bgpd,bxgd->bgpx", grouped, keys).flatten(1, 2) for keys, _, _ in parts]
        place = torch.cat([place for _, _, place in parts], 1).unsqueeze(1)
        allowed = layout.allows(query.unsqueeze(1), place) & (place >= 0)
        weights = torch.cat(scores, -1).masked_fill(~allowed, -math.inf).softmax(-1)
        weights = weights.reshape(B, G, H // G, place.shape[-1])
        o, begin = torch.zeros((), dtype=dtype, device=q.device), 0
        for _, values, _ in parts:
            share = weights[..., begin : begin + values.shape[1]]
            o, begin = o + torch.einsum("bgpx,bxgm->bgpm", share, values), begin + values.shape[1]
    after = _add(layout, state, k, v, position, (W + 1) % _fold(layout), 1)
    return o.flatten(1, 2).to(out_dtype), after


def _fold(layout: Layout) -> int:
    """Return how many tokens a state collects before they move to its past: whole blocks, 64 at least."""
    return layout.stride * -(-64 // layout.stride)


def _gathered(
    layout: Layout, state: FactorizedState, k: Tensor, v: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the keys that the last token reads in the strided pattern: its window, then one per stride.

    Returns keys and values `[B,X,G,..]`, from the past and from the recent `k`, `v [B,W,G,..]`, and their
    positions `[B,X]`, negative for none.
    """
    stride, query, base = layout.stride, position[:, -1:], position[:, :1]
    seen, first = state.past_k.shape[1] + k.shape[1], layout.window // stride + 1
    near = torch.arange(layout.window + 1, device=k.device)
    far = stride * torch.arange(first, max(first, seen // stride + 1), device=k.device)
    read = query - torch.cat([near, far])
    keys, values = _take(k, read - base), _take(v, read - base)
    if state.past_k.shape[1] > 0:
        recent = (read >= base)[..., None, None]
        keys = torch.where(recent, keys, _take(state.past_k, read))
        values = torch.where(recent, values, _take(state.past_v, read))
    return keys, values, read


def _take(x: Tensor, place: Tensor) -> Tensor:
    """Read `x [B,P,G,D]` at `place [B,X]`, moved into range: `[B,X,G,D]`."""
    return reorder(x, place.clamp(0, x.shape[1] - 1))


def _positions_kept(layout: Layout, past: Tensor, query: Tensor, base: Tensor) -> Tensor:
    """Return the position of the key in each slot of the past, in the fixed pattern: `[B,P]`.

    `query [B,1]` is the position of the query. The result is -1 where the slot holds none of the first
    `base [B,1]` tokens, or one that another slot also holds.
    """
    stride, kept, device = layout.stride, layout.summary * layout.subblocks, past.device
    begin = query // stride * stride
    current = begin + torch.arange(stride, device=device)
    block = torch.arange(_blocks_kept(layout, past), device=device).unsqueeze(1) * stride
    later = (block + torch.arange(stride - kept, stride, device=device)).flatten()
    return torch.cat(
        [torch.where(current < base, current, -1), torch.where(later < begin.minimum(base), later, -1)], 1
    )


def _check_state(layout: Layout, state: FactorizedState, k: Tensor, v: Tensor) -> None:
    """Require the sizes of this layout and, where values can be read at no cost, slots for all tokens seen.

    A state of another layout passes if its sizes are also possible here.
    """
    (B, _, G, D), M = k.shape, v.shape[3]
    for part in ("past", "recent"):
        for name, W in (("k", D), ("v", M)):
            x = getattr(state, f"{part}_{name}")
            if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (B, G, W):
                raise ValueError(f"state.{part}_{name} has shape {shape(x)}, but must be [{B}, X, {G}, {W}]")
    for name in ("k", "v"):
        slots, recent = (getattr(state, f"{part}_{name}").shape[1] for part in ("past", "recent"))
        first, per_block = _slot_sizes(layout)
        if slots < first or (slots - first) % per_block:
            raise ValueError(
                f"state.past_{name} has {slots} slots, but must have {first} and a multiple of {per_block} "
                f"for {layout.kind} attention of stride = {layout.stride}: it is the state of other options"
            )
        if recent >= _fold(layout):
            raise ValueError(
                f"state.recent_{name} has {recent} tokens, but must have fewer than {_fold(layout)} for "
                f"{layout.kind} attention of stride = {layout.stride}: it is the state of other options"
            )
    if may_read(state.position) and len(state.position):
        seen, room = int(state.position.max()), _blocks_kept(layout, state.past_k) * layout.stride
        if seen > room + state.recent_k.shape[1]:
            raise ValueError(
                f"state.past_k has {state.past_k.shape[1]} slots, but must have more after {seen} tokens for "
                f"{layout.kind} attention of stride = {layout.stride}: it is the state of other options"
            )


def _slot_sizes(layout: Layout) -> tuple[int, int]:
    """Return the initial number of slots of the past, and the number added for each block."""
    if layout.kind == "strided":
        return 0, layout.stride
    return layout.stride, layout.summary * layout.subblocks


def _blocks_kept(layout: Layout, past: Tensor) -> int:
    """Return the number of blocks that the past has slots for."""
    first, per_block = _slot_sizes(layout)
    return (past.shape[1] - first) // per_block


def _slots(layout: Layout, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two slots of a position in the past: within the current block, and for later blocks.

    In the strided pattern, both are the position itself. In the fixed pattern, the first l slots are for the
    current block, and are followed by slots for the last c u tokens of each block; other tokens have a
    negative second slot.
    """
    if layout.kind == "strided":
        return position, position
    stride, kept = layout.stride, layout.summary * layout.subblocks
    block, place = position // stride, position % stride - (stride - kept)
    return position % stride, torch.where(place < 0, -1, stride + block * kept + place)


def _store(layout: Layout, past: Tensor, x: Tensor, position: Tensor, following: Tensor) -> Tensor:
    """Add tokens `x [B,W,G,D]` at `position [B,W]`, -1 = padding, to the past.

    `following [B]` is the position of the next token. The past grows by as many whole blocks as are needed,
    or may be needed where the position cannot be read.
    """
    slot, later = _slots(layout, position)
    first, per_block = _slot_sizes(layout)
    if may_read(following):
        blocks = -(-max(following.tolist(), default=0) // layout.stride)
        n = max(past.shape[1], first + blocks * per_block)
    else:  # at most
        n = past.shape[1] + -(-x.shape[1] // layout.stride) * per_block
    if layout.kind == "fixed":
        current = position // layout.stride == (following // layout.stride).unsqueeze(1)
        slot, x = torch.cat([torch.where(current, slot, -1), later], 1), torch.cat([x, x], 1)
        position = torch.cat([position, position], 1)
    return _scatter(_longer(past, n), x, torch.where(position < 0, -1, slot))


def _longer(x: Tensor, n: int) -> Tensor:
    return pad(x, (0, 0, 0, 0, 0, n - x.shape[1]))


def _scatter(x: Tensor, tokens: Tensor, slot: Tensor) -> Tensor:
    """Write `tokens [B,W,G,D]` into a copy of `x [B,P,G,D]`, each at its slot `[B,W]`, -1 for nowhere."""
    n = x.shape[1]
    slot = torch.where(slot < 0, n, slot)[..., None, None].expand_as(tokens)
    return _longer(x, n + 1).scatter(1, slot, tokens)[:, :n].contiguous()


def _whole(layout: Layout, past: Tensor, base: Tensor, n: int) -> Tensor:
    """Place what is kept of the first `base [B]` tokens at their positions: `[B,n,G,D]`, zeros elsewhere."""
    if layout.kind == "strided":
        return _longer(past, n)
    stride, kept = layout.stride, layout.summary * layout.subblocks
    later = past[:, stride:]
    later = later.reshape(len(past), _blocks_kept(layout, past), kept, *past.shape[2:])
    later = pad(later, (0, 0, 0, 0, stride - kept, 0)).flatten(1, 2)
    position = (base // stride * stride).unsqueeze(1) + torch.arange(stride, device=base.device)
    current = torch.where(position < base.unsqueeze(1), position, -1)
    return _scatter(_longer(later, n), past[:, :stride], current)


def _add(
    layout: Layout, state: FactorizedState, k: Tensor, v: Tensor, place: Tensor, keep: int, new: Tensor | int
) -> FactorizedState:
    """Make the state after `k`, `v [B,X,G,..]` at positions `place [B,X]`: the recent tokens, then new ones.

    The last `keep` of them stay recent; `new` counts the new ones.
    """
    begin = k.shape[1] - keep
    following = state.position + new - keep
    past_k, past_v = state.past_k, state.past_v
    if begin > 0:
        past_k, past_v = (
            _store(layout, past, x[:, :begin], place[:, :begin], following)
            for past, x in ((past_k, k), (past_v, v))
        )
        k, v = k[:, begin:].clone(), v[:, begin:].clone()
    return FactorizedState(past_k, past_v, k, v, state.position + new)
