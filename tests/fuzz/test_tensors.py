"""Calls of public functions and modules with one argument that is wrong are refused in one sentence."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from fuzzing import BrokenError, Case, blocks, check_refusal, run
from public_calls import B, Call, D, H, T, cell, heads, mechanism, model, normal, padding
from small_models import FIELDS
from torch import Tensor

from unrolled import alignment, attention, recurrent
from unrolled.generation import sampling
from unrolled.ops.dplr import dplr, dplr_step
from unrolled.ops.feature_maps import FEATURE_MAPS, make_feature_map
from unrolled.ops.gla import diagonal_linear_attention, diagonal_linear_attention_step
from unrolled.ops.linear import LinearState, linear_attention, linear_attention_step
from unrolled.ops.selective_scan import selective_scan, selective_scan_step
from unrolled.ops.softmax import softmax_attention
from unrolled.ops.state import leaves, map_tensors, select
from unrolled.ops.window import window_attention
from unrolled.ops.wkv import wkv, wkv_step

NOT_A_NUMBER: list[Any] = ["x", "", None, float("nan"), True, [1], {}, (), torch.ones(2), 1j]
HUGE = 10**30
WRONG = {
    int: [*NOT_A_NUMBER, 1.5, -1, HUGE],
    float: [*NOT_A_NUMBER, -1.0],
    bool: ["no", 1, 0.0, None, [], torch.ones(2)],
    str: ["none", "", 3, None, [], True],
}
# Arguments that take more than their example shows.
NONE = type(None)
RIGHT = {
    "prompt_ids": (list,),
    "window_size": (list,),
    "stop": (list, NONE),
    "seed": (NONE,),
    "top_k": (NONE,),
}
UNLIMITED = {"top_k"}  # of these, a huge number is right
BROADCAST = {"attn_mask", "v", "value", "logits"}  # of these, another width or number of axes may be right


def operations() -> dict[str, Call]:
    qkv, step = heads(), {name: normal(B, H, D) for name in "qkv"}
    state, diagonal = LinearState(normal(B, H, D, D), normal(B, H, D)), normal(B, H, D, D)
    positive = {name: x.exp() for name, x in qkv.items()}
    gate, gates = -normal(B, T, H, D).abs(), {"state": diagonal}
    masks = {"causal": True, "key_padding_mask": padding()}
    logits = normal(B, 7)
    rule = {"a": normal(B, T, H, D), "b": normal(B, T, H, D), "log_decay": gate}
    rule_step = {name: x[:, 0] for name, x in rule.items()}
    averages = {"log_decay": -normal(D).abs(), "bonus": normal(D), "state": normal(B, 3, D).exp()}
    tokens = {name: normal(B, T, D).abs() for name in ("x", "dt")} | {name: normal(B, T, H) for name in "bc"}
    scan = {**tokens, "a": -normal(D, H).abs(), "state": normal(B, D, H)}
    return {
        "linear_attention": (linear_attention, {**positive, **masks, "state": state}),
        "linear_attention_step": (linear_attention_step, {**step, "state": state}),
        "diagonal_linear_attention": (diagonal_linear_attention, qkv | gates | {"log_decay": gate}),
        "diagonal_linear_attention_step": (
            diagonal_linear_attention_step,
            step | gates | {"log_decay": gate[:, 0]},
        ),
        "dplr": (dplr, qkv | gates | rule),
        "dplr_step": (dplr_step, step | gates | rule_step),
        "softmax_attention": (softmax_attention, {**qkv, **masks, "scale": 0.5}),
        "softmax_attention with a mask": (softmax_attention, qkv | {"attn_mask": torch.ones(T, T).bool()}),
        "window_attention": (window_attention, {**qkv, "window_size": (2, 0), "key_padding_mask": padding()}),
        "selective_scan": (selective_scan, scan | {"key_padding_mask": padding()}),
        "selective_scan_step": (selective_scan_step, scan | {name: scan[name][:, 0] for name in tokens}),
        "wkv": (wkv, {"k": normal(B, T, D), "v": normal(B, T, D), **averages, "key_padding_mask": padding()}),
        "wkv_step": (wkv_step, {"k": normal(B, D), "v": normal(B, D), **averages}),
        "temperature": (sampling.temperature, {"logits": logits, "value": 0.5}),
        "top_k": (sampling.top_k, {"logits": logits, "k": 2}),
        "top_p": (sampling.top_p, {"logits": logits, "p": 0.5}),
        "min_p": (sampling.min_p, {"logits": logits, "p": 0.5}),
    }


def feature_map(name: str) -> dict[str, Call]:
    made = make_feature_map(name, D, H)
    options = {"name": name, "head_dim": D, "n_heads": H, "n_kv_heads": H}
    return {
        f"feature map {name}": (
            partial(made.phi_q, positions=torch.arange(T).expand(B, T)),
            {"q": normal(B, T, H, D)},
        ),
        f"make {name}": (make_feature_map, options),
    }


@cache
def calls(group: str) -> dict[str, Call]:
    torch.manual_seed(0)
    kind, _, name = group.partition(" ")
    made = {"mechanism": mechanism, "cell": cell, "model": model, "map": feature_map}
    return operations() if kind == "operations" else made[kind](name)


GROUPS = [
    *["operations"] * 10,
    *(f"mechanism {name}" for name in [*attention.names(), *alignment.names()]),
    *(f"cell {name}" for name in recurrent.names()),
    *(f"model {kind}" for kind in FIELDS),
    *(f"map {name}" for name in FEATURE_MAPS),
]


def spoiled_tensor(random: Random, name: str, x: Tensor) -> tuple[str, Any]:
    """Make of a tensor what it must not be."""
    found: list[tuple[str, Any]] = [("a text", "x"), ("a number", 3), ("a tuple of it", (x,))]
    found += [("a list", x.tolist()), ("an array", x.numpy())]
    found += [("complex", x.to(torch.complex64)), ("quantized", x.to(torch.uint8))]
    if name not in BROADCAST:
        found += [("on meta", x.to("meta"))]
        found += [("a row", x[0]), ("an axis more", x[None]), ("a scalar", x.sum())]
        if x.is_floating_point():
            found += [("wider", torch.cat([x, x[..., :1]], -1)), ("of no width", x[..., :0])]
    if x.is_floating_point():
        found += [("integers", x.long()), ("boolean", x > 0)]
    elif x.dtype == torch.bool:
        found += [("integers", x.long()), ("a length more", torch.cat([x, x[:, :1]], 1))]
    else:
        found += [("floating point", x.float()), ("negative", -1 - x), ("out of range", x + 10**6)]
    return random.choice(found)


def spoiled_state(random: Random, state: Any) -> tuple[str, Any]:
    """Make of a state one of other sizes or fields."""
    found = [("None", None), ("empty", ()), ("a list", list(state)), ("a text", "x")]
    found += [("a dict", state._asdict()), ("a tensor", torch.zeros(B, 3))]
    found += [("too many rows", select(state, [0, 0, 0]))]
    changes: dict[str, Callable[[Tensor], Any]] = {
        "None": lambda x: None,
        "a list": Tensor.tolist,
        "wider": lambda x: torch.cat([x, x[:1]], 0),
        "complex": lambda x: x.to(torch.complex64),
        "a row": lambda x: x[None],
    }
    at, how = random.randrange(len(leaves(state))), random.choice(list(changes))
    numbers = iter(range(len(leaves(state))))
    changed = map_tensors(lambda x: changes[how](x) if next(numbers) == at else x, state)
    return random.choice(found + [(f"field {at}: {how}", changed)] * 7)


def spoiled(random: Random, name: str, value: Any) -> tuple[str, Any]:
    """Make of any argument what it must not be."""
    if isinstance(value, Tensor):
        return spoiled_tensor(random, name, value)
    if hasattr(value, "_asdict"):
        return spoiled_state(random, value)
    if isinstance(value, list | tuple):
        made = random.choice([None, [], "x", 3, ["x"], [1.5, 2], [-1, 0], [[1]]])
        return repr(made), made
    if type(value) in WRONG:
        wrong = [x for x in WRONG[type(value)] if not isinstance(x, RIGHT.get(name, ()))]
        made = random.choice([x for x in wrong if x is not HUGE or name not in UNLIMITED])
        return repr(made), made
    return random.choice([("None", None), ("a text", "x"), ("a list", [1])])


def on_meta(found: Any) -> bool:
    return found.is_meta if isinstance(found, Tensor) else any(map(on_meta, found))


def optional(function: Any, name: str) -> bool:
    """Whether None is a value of the argument."""
    taken = inspect.signature(getattr(function, "forward", function)).parameters.get(name)
    return taken is not None and (taken.default is None or "None" in str(taken.annotation))


@blocks
def test_tensors(seeds: range, record_property: object) -> None:
    def case(random: Case) -> str:
        made = calls(random.choice(GROUPS))
        label = random.choice(list(made))
        function, arguments = made[label]
        if random.random() < 0.05:
            function(**arguments)
            return "right"
        name = random.choice(list(arguments))
        how, value = spoiled(random, name, arguments[name])
        if isinstance(value, RIGHT.get(name, ())) or (value is None and optional(function, name)):
            return "skipped"
        random.what = f"{label}: {name} is {how}"
        try:
            with torch.no_grad():
                found = function(**arguments | {name: value})
        except Exception as error:
            return check_refusal(error, random.what)
        if how == "on meta" and on_meta(found):
            return "right"  # nothing is computed
        # All tokens are kept; integers of any type; nothing to stop at.
        taken = {("k", repr(10**30)), ("prompt_ids", "quantized"), ("stop", "()"), ("scale", "-1.0")}
        if (name, how) in taken:
            return "right"
        if label.startswith("feature map") and how in ("a row", "an axis more"):
            return "right"  # a map takes any axes before the heads
        raise BrokenError(f"{random.what}: was accepted")

    run(case, seeds, record_property, seconds=10)


def test_a_call_that_breaks_inside_is_found() -> None:
    with pytest.raises(BrokenError, match="AttributeError"):
        check_refusal(AttributeError("x"), "a call")
