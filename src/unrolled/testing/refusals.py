"""Unsupported and invalid arguments raise errors that say what is wrong; none is ignored silently."""

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.state import leaves
from unrolled.testing._kit import Maker, assert_raises, claimed_variants, directions, normal, recurrent


def check_refuses_unclaimed(make: Maker, supports: Supports) -> None:
    """Using a capability that is not claimed raises UnsupportedError."""
    x = make.input(2, 5, grad=False)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 0] = True
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)

    def refused(what: str, target: Any, verb: str, *args: Any, **masks: Any) -> None:
        assert_raises(UnsupportedError, f"{what} (not claimed)", target, verb, *args, **masks)

    for causal, claimed in ((True, supports.causal), (False, supports.bidirectional)):
        if not claimed:
            try:
                module = make(causal=causal)
            except UnsupportedError:
                continue
            refused(f"causal={causal}", module, "forward", x)
    if supports.recurrence == "none":
        refused("init_state", make(causal=directions(supports)[0]), "init_state", 2)
    for causal, module in make.each_direction(supports):
        if not supports.cross:
            refused(f"causal={causal}, cross-attention", module, "forward", x, x.flip(1), x.flip(1))
        if not supports.padding:
            refused(f"causal={causal}, key_padding_mask", module, "forward", x, key_padding_mask=mask)
        if not supports.attn_mask:
            refused(f"causal={causal}, attn_mask", module, "forward", x, attn_mask=lower)
        if not supports.packing:
            refused(f"causal={causal}, cu_seqlens", module, "forward", x[:1], cu_seqlens=cu_seqlens)
        if not (causal and recurrent(supports)):
            what = f"causal={causal}, recurrence={supports.recurrence!r}"
            state = make(causal=True).init_state(2) if recurrent(supports) else ()
            refused(f"{what}, prefill", module, "prefill", x, state)
            refused(f"{what}, step", module, "step", x[:, 0], state)
        elif not supports.padding:
            state = module.init_state(2)
            refused("prefill with key_padding_mask", module, "prefill", x, state, key_padding_mask=mask)


def check_rejects_wrong_input(make: Maker, supports: Supports) -> None:
    """Arguments of a wrong shape or type raise ValueError, in every method."""
    for causal in directions(supports):
        _check_forward_rejects(make, supports, causal)
        for variant, _ in claimed_variants(make, causal):
            if variant.startswith("n_kv_heads"):
                what = "n_heads that is not a multiple of n_kv_heads"
                assert_raises(ValueError, what, make, "__call__", causal=causal, n_kv_heads=make.n_heads + 1)
    if recurrent(supports):
        _check_recurrence_rejects(make, supports)


def _check_forward_rejects(make: Maker, supports: Supports, causal: bool) -> None:
    module = make(causal=causal)
    x, wide = make.input(2, 5, grad=False), normal(2, 5, make.d_model + 1).to(make.dtype)

    def rejected(what: str, *args: Tensor, **masks: Tensor) -> None:
        assert_raises(ValueError, f"causal={causal}, {what}", module, "forward", *args, **masks)

    rejected("query of another width than d_model", wide)
    rejected("query without a batch", x[0])
    if supports.cross:
        rejected("key of another width than d_model", x, wide, wide)
        rejected("key of another batch size than query", x, x[:1], x[:1])
        rejected("value of another length than key", x, x, x[:, :4])
    if supports.padding:
        for wrong, mask in wrong_masks(2, 5):
            rejected(f"key_padding_mask {wrong}", x, key_padding_mask=mask)
    if supports.attn_mask:
        for wrong, mask in wrong_masks(5, 5):
            if not mask.is_floating_point():  # a floating-point mask may be added to the scores
                rejected(f"attn_mask {wrong}", x, attn_mask=mask)
    if supports.packing:
        right = torch.tensor([0, 2, 5], dtype=torch.int32)
        for wrong, cu_seqlens in (
            ("that decreases", right[[0, 2, 1, 2]]),
            ("that does not begin with 0", right[1:]),
            ("that does not end with the length", right[:-1]),
            ("of type float", right.float()),
            ("of shape [1, 3]", right[None]),
        ):
            rejected(f"cu_seqlens {wrong}", x[:1], cu_seqlens=cu_seqlens)
        rejected("cu_seqlens with a batch of 2", x, cu_seqlens=right)


def _check_recurrence_rejects(make: Maker, supports: Supports) -> None:
    module = make(causal=True)
    x, wide = make.input(2, 5, grad=False), normal(2, 5, make.d_model + 1).to(make.dtype)
    state = module.init_state(2)
    of_other_width = _state_of_other_width(make, state)
    for verb, right, too_wide in (("prefill", x, wide), ("step", x[:, 0], wide[:, 0])):
        for wrong, token, carried in (
            ("x of another width than d_model", too_wide, state),
            ("x without a batch", right[0], state),
            ("a state of another batch size", right, module.init_state(3)),
            *(("a state of another d_model", right, other) for other in of_other_width),
        ):
            assert_raises(ValueError, f"{verb} with {wrong}", module, verb, token, carried)
    if supports.padding:
        for wrong, mask in wrong_masks(2, 5):
            what = f"prefill with key_padding_mask {wrong}"
            assert_raises(ValueError, what, module, "prefill", x, state, key_padding_mask=mask)


def _state_of_other_width(make: Maker, state: Any) -> list[Any]:
    """Return a state of a layer that is twice as wide, unless its sizes are those of an option."""
    try:
        other = replace(make, d_model=2 * make.d_model)(causal=True).init_state(2)
    except (ValueError, UnsupportedError):  # the options are for this width only
        return []
    sizes, others = ([x.shape for x in leaves(each).values()] for each in (state, other))
    return [other] if others != sizes else []


def wrong_masks(rows: int, columns: int) -> list[tuple[str, Tensor]]:
    """List masks that are invalid in place of a boolean `[rows,columns]`, each with what is wrong."""
    return [
        ("of a wrong shape", torch.ones(rows, columns + 1, dtype=torch.bool)),
        ("of type float", torch.ones(rows, columns)),
        ("of type int64", torch.ones(rows, columns, dtype=torch.int64)),
    ]


def check_rejects_other_states(make: Maker, supports: Supports) -> None:
    """Anything but a state of this layer raises ValueError, in `prefill` and `step`.

    The check tries None, a list and another tuple in place of the state. In place of each tensor of the
    state, it tries something that is not a tensor, and tensors of another type, device, number of axes, size
    or number of rows.
    """
    module = make(causal=True)
    x = make.input(2, 3, grad=False)
    for seen in (0, 3):
        _, state = module.prefill(x[:, :seen], module.init_state(2))
        others = {"None": None, "nothing": (), "a list": list(state), "a tuple without names": tuple(state)}
        if hasattr(state, "_fields"):
            others["a tuple of another kind"] = namedtuple("Another", state._fields)(*state)
        for name, part in leaves(state).items():
            for what, wrong in _wrong_tensors(part):
                others[f"a state whose {name} is {what}"] = _with_leaf(state, name, wrong)
        for what, other in others.items():
            for verb, given in (("prefill", x), ("step", x[:, 0])):
                assert_raises(ValueError, f"{verb} after {seen} tokens, {what}", module, verb, given, other)


def _wrong_tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield values that are invalid in place of the tensor `x` of a state."""
    yield "None", None
    yield "a list", x.tolist()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.bool):
        if dtype != x.dtype:
            yield f"of {dtype}", x.to(dtype)
    yield "on another device", x.to("meta")
    yield "without a batch", x[0]
    yield "of one axis more", x.unsqueeze(-1)
    for axis in range(x.dim()):
        one = list(x.shape)
        one[axis] = 1
        yield f"longer along axis {axis}", torch.cat([x, x.new_zeros(one)], axis)


def _with_leaf(state: Any, name: str, x: Any) -> Any:
    """Put `x` where `leaves` finds the tensor of this name."""
    first, _, rest = name.partition(".")
    names = list(getattr(state, "_fields", map(str, range(len(state)))))
    parts = list(state)
    at = names.index(first)
    parts[at] = _with_leaf(parts[at], rest, x) if rest else x
    return state._make(parts) if hasattr(state, "_make") else tuple(parts)
