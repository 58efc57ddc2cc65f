"""Conversion of the state of a model into the state of its plan, and back.

Both hold the same numbers. A plan keeps the numbers of a sequence in one row, which the kernel updates in
place: sums S, then z; a window with the token at position p in slot p % window; a cache without padding.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.decode.memory import PlanState
from unrolled.decode.program import KEY_BLOCK, Constants, Slot
from unrolled.models import DecoderState
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.wkv.plain import LOWEST

Fields = dict[str, Tensor]
Slots = Sequence[Sequence[Slot | Constants]]


def from_model(slots: Slots, state: DecoderState, after: PlanState) -> None:
    """Copy the state of a model into that of a plan, which has room for its tokens.

    Raises:
        ValueError: the state was made with random features that differ from the plan's.
    """
    after.position.copy_(state.position)
    for own, layer in zip(slots, state.layers, strict=True):
        parts = _parts(layer)
        for slot in own:
            if isinstance(slot, Constants):
                _check_constants(slot, parts)
            else:
                _READ[slot.kind](slot, parts, after)


def to_model(slots: Slots, state: PlanState, like: DecoderState) -> DecoderState:
    """Copy the state of a plan into a state of its model, of the types of `like`."""
    layers = []
    for own, layer in zip(slots, like.layers, strict=True):
        found: Fields = {"position": state.position.clone()}
        for slot in own:
            if isinstance(slot, Constants):
                rows = len(state.position)
                found |= {name: x.repeat(rows, *[1] * (x.dim() - 1)) for name, x in slot.parts.items()}
            else:
                found |= _WRITE[slot.kind](slot, state)
        layers.append(_filled(layer, found, len(state.position)))
    return DecoderState(state.position.clone(), tuple(layers))


def _check_constants(constants: Constants, parts: Fields) -> None:
    for name, x in constants.parts.items():
        if not (parts[name] == x).all():
            raise ValueError(
                f"{name} of the state is {parts[name].tolist()}, but must be {x.tolist()}, as in the plan"
            )


def _parts(state: Any) -> Fields:
    """Name the tensors of a layer's state, including those of states inside it."""
    found: Fields = {}
    for name, part in zip(state._fields, state, strict=True):
        found |= {name: part} if isinstance(part, Tensor) else _parts(part)
    return found


def _filled(like: Any, found: Fields, rows: int) -> Any:
    """Return a state of the type of `like`. What a plan does not keep is 0: no output depends on it."""
    parts = [
        (found[name] if name in found else part.new_zeros(rows, *part.shape[1:]))
        if isinstance(part, Tensor)
        else _filled(part, found, rows)
        for name, part in zip(like._fields, like, strict=True)
    ]
    return like._make(parts)


def _part(fixed: Tensor, place: int, sizes: tuple[int, ...]) -> Tensor:
    """View a part of the rows."""
    return fixed[:, place : place + math.prod(sizes)].view(len(fixed), *sizes)


def _read_convolution(slot: "Slot", parts: Fields, after: PlanState) -> None:
    _part(after.fixed, slot.place, slot.sizes).copy_(parts[slot.part])


def _write_convolution(slot: "Slot", state: PlanState) -> Fields:
    return {slot.part: _part(state.fixed, slot.place, slot.sizes).clone()}


def _read_average(slot: "Slot", parts: Fields, after: PlanState) -> None:
    given = torch.stack([parts["num"], parts["den"], parts["top"]], 1)
    _part(after.fixed, slot.place, (3, *slot.sizes)).copy_(given)


def _write_average(slot: "Slot", state: PlanState) -> Fields:
    num, den, top = _part(state.fixed, slot.place, (3, *slot.sizes)).unbind(1)
    return {"num": num.clone(), "den": den.clone(), "top": top.masked_fill(den == 0, LOWEST)}


def _read_scan(slot: "Slot", parts: Fields, after: PlanState) -> None:
    _part(after.fixed, slot.place, slot.sizes).copy_(parts["h"].mT)


def _write_scan(slot: "Slot", state: PlanState) -> Fields:
    return {"h": _part(state.fixed, slot.place, slot.sizes).mT.clone(memory_format=torch.contiguous_format)}


def _sums(slot: "Slot", fixed: Tensor) -> Fields:
    G, R, M = slot.sizes
    found = {"kv": _part(fixed, slot.place, slot.sizes)}
    if slot.divided:
        found["k_sum"] = _part(fixed, slot.place + G * R * M, (G, R))
    if slot.averaged:
        found["weight"] = _part(fixed, slot.place + G * R * (M + 1), (G,))
    return found


def _read_recurrence(slot: "Slot", parts: Fields, after: PlanState) -> None:
    for name, x in _sums(slot, after.fixed).items():
        x.copy_(parts[name])


def _write_recurrence(slot: "Slot", state: PlanState) -> Fields:
    return {name: x.clone() for name, x in _sums(slot, state.fixed).items()}


def _keys(rows: Tensor, place: int, groups: int, slots: int, width: int) -> Tensor:
    """View keys `[B,G,S,D]`, which lie in blocks of slots, as `[B,G,S/16,16,D]`."""
    return _part(rows, place, (groups, slots // KEY_BLOCK, width, KEY_BLOCK)).transpose(3, 4)


def _window(slot: "Slot", state: PlanState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return copies of the keys and values of a window, the slots of the last tokens, and which exist."""
    G, window, D = slot.sizes
    slots = -(-window // KEY_BLOCK) * KEY_BLOCK
    keys = _keys(state.fixed, slot.place, G, slots, D).flatten(2, 3)
    values = _part(state.fixed, slot.place + G * slots * D, (G, slots, slot.values)).clone()
    last = state.position.unsqueeze(1) + torch.arange(1 - window, 0, device="cpu")
    return keys, values, (last % window)[:, None, :, None], (last >= 0)[:, None, :, None]


def _read_window(slot: "Slot", parts: Fields, after: PlanState) -> None:
    keys, values, slots, _ = _window(slot, after)
    k, v = (
        store.scatter(2, slots.expand_as(x), x.to(store.dtype))
        for store, x in ((keys, parts["k"]), (values, parts["v"]))
    )
    blocks = torch.unflatten(k, 2, (-1, KEY_BLOCK)).transpose(3, 4).flatten(1)
    both = torch.cat([blocks, v.flatten(1)], 1)
    after.fixed[:, slot.place : slot.place + both.shape[1]] = both


def _write_window(slot: "Slot", state: PlanState) -> Fields:
    *stores, slots, valid = _window(slot, state)
    k, v = (x.gather(2, slots.expand(*x.shape[:2], -1, x.shape[3])).where(valid, 0) for x in stores)
    return {"k": k, "v": v}


def _cached(slot: "Slot", state: PlanState) -> tuple[Tensor, Tensor]:
    """View the keys [B,G,S/16,16,D] and values [B,G,S,M] of a cache."""
    B, S, width = state.cache.shape
    G, _, D = slot.sizes
    M, rows, begin = slot.values, state.cache.view(B, S * width), slot.place * S
    return _keys(rows, begin, G, S, D), _part(rows, begin + G * S * D, (G, S, M))


def _read_cache(slot: "Slot", parts: Fields, after: PlanState) -> None:
    k, v, padding = (
        torch.cat([parts[f"past_{name}"], parts[f"recent_{name}"]], axis)
        for name, axis in (("k", 2), ("v", 2), ("padding", 1))
    )
    (k, v), _, _ = valid_tokens_first(padding, k.transpose(1, 2), v.transpose(1, 2))
    keys, values = _cached(slot, after)
    n, slots = min(k.shape[1], values.shape[2]), values.shape[2]
    k, v = (pad(x[:, :n].transpose(1, 2), (0, 0, 0, slots - n)) for x in (k, v))
    keys.copy_(torch.unflatten(k, 2, (-1, KEY_BLOCK)))
    values.copy_(v)


def _write_cache(slot: "Slot", state: PlanState) -> Fields:
    n = int(state.position.max()) if len(state.position) else 0
    keys, values = _cached(slot, state)
    k, v = keys.flatten(2, 3)[:, :, :n].clone(), values[:, :, :n].clone()  # of one block, flatten is a view
    padding = torch.arange(n, device="cpu") >= state.position.unsqueeze(1)
    past = {"past_k": k, "past_v": v, "past_padding": padding}
    return past | {"recent_k": k[:, :, :0], "recent_v": v[:, :, :0], "recent_padding": padding[:, :0]}


_READ: dict[str, Callable[["Slot", Fields, PlanState], None]] = {
    "convolution": _read_convolution,
    "average": _read_average,
    "scan": _read_scan,
    "recurrence": _read_recurrence,
    "window": _read_window,
    "cache": _read_cache,
}
_WRITE: dict[str, Callable[["Slot", PlanState], Fields]] = {
    "convolution": _write_convolution,
    "average": _write_average,
    "scan": _write_scan,
    "recurrence": _write_recurrence,
    "window": _write_window,
    "cache": _write_cache,
}
