"""All forms compute one function: outputs and gradients do not depend on how a sequence is split."""

import torch

from unrolled.contract import Supports
from unrolled.ops.state import detach
from unrolled.testing._kit import (
    Maker,
    Plan,
    assert_close,
    assert_finite,
    claimed_variants,
    describe,
    recurrent,
    require,
    unroll,
    with_gradients,
)

LONG = 133
"""Longer than two chunks of 64 and one of 128, and a multiple of neither."""


def check_forms_agree(make: Maker, supports: Supports) -> None:
    """`forward` equals any mix of `prefill` and `step`, in outputs and gradients, and without autograd."""
    mixed: Plan = [("step", 2), ("prefill", 3), ("step", 1), ("prefill", 1)]
    resumed: Plan = [("prefill", 64), ("prefill", LONG - 64)]
    common = [[("prefill", 7)], mixed, resumed]
    default: list[Plan] = [
        *common,
        [("prefill", 1)],
        [("step", 1)],
        [("step", 7)],
        *([("prefill", n), ("step", 7 - n)] for n in (0, 1, 6)),
        *([("prefill", n), ("prefill", 7 - n)] for n in (0, 1, 4, 7)),
        [("prefill", LONG)],
        [("prefill", 62), ("step", 4), ("prefill", LONG - 66)],
    ]
    for variant, module in claimed_variants(make, causal=True):
        expected: dict[int, dict[str, torch.Tensor]] = {}
        for plan in default if variant == "default" else common:
            length = sum(n for _, n in plan)
            x = make.input(2, length)
            if length not in expected:
                expected[length] = with_gradients(module, module(x), x=x)
                with torch.no_grad():
                    what = f"{variant}: forward of {length} tokens without autograd"
                    assert_close(module(x), expected[length]["output"], what)
            found = with_gradients(module, unroll(module, x, plan)[0], x=x)
            assert_close(found, expected[length], f"{variant}: {describe(plan)} against forward")
            with torch.no_grad():
                what = f"{variant}: {describe(plan)} without autograd against forward"
                assert_close(unroll(module, x, plan)[0], expected[length]["output"], what)


def check_gradients_through_state(make: Maker, supports: Supports) -> None:
    """Gradients flow through a carried state to earlier tokens; detaching the state stops only these."""
    module = make(causal=True)
    for first, rest in ((4, 3), (70, LONG - 70)):
        x = make.input(2, first + rest)
        expected = with_gradients(module, module(x)[:, first:], x=x)
        for plan in ([("prefill", rest)], [("step", 3), ("prefill", rest - 3)]):
            _, state = unroll(module, x[:, :first], [("prefill", first)])
            y, _ = unroll(module, x[:, first:], plan, state)
            what = f"prefill({first}), then {describe(plan)} from the carried state"
            assert_close(with_gradients(module, y, x=x), expected, what)
            _, state = unroll(module, x[:, :first], [("prefill", first)])
            y, _ = unroll(module, x[:, first:], plan, detach(state))
            found = {"gradient of x": with_gradients(module, y, x=x)["gradient of x"]}
            truncated = {"gradient of x": expected["gradient of x"].clone()}
            truncated["gradient of x"][:, :first] = 0
            assert_close(found, truncated, f"{what}, detached")


def check_head_shapes(make: Maker, supports: Supports) -> None:
    """Grouped key/value heads and free head widths are honoured (or refused), never ignored."""
    default: list[torch.Size] = []
    for causal, variant, module in make.each_variant(supports):
        x = make.input(2, 5)
        y = module(x)
        require(y.shape == x.shape, f"{variant}: output {list(y.shape)} for input {list(x.shape)}")
        assert_finite(with_gradients(module, y, x=x), f"{variant}, causal={causal}")
        shapes = [p.shape for p in module.parameters()]
        default = shapes if variant == "default" else default
        ignored = variant not in ("default", "rotary=True") and shapes == default
        require(not ignored, f"{variant} was accepted, yet no parameter has another shape")


def check_short_and_empty(make: Maker, supports: Supports) -> None:
    """Length 0, length 1, odd lengths and batch 0 work in every method, with gradients."""
    for causal, module in make.each_direction(supports):
        for batch, length in ((2, 0), (2, 1), (1, 3), (2, 65), (0, 4), (0, 0)):
            what = f"causal={causal}, input [{batch}, {length}, {make.d_model}]"
            x = make.input(batch, length)
            y = module(x)
            require(y.shape == x.shape, f"{what}: output has shape {list(y.shape)}")
            _require_reached(y, x, what)
            assert_finite(with_gradients(module, y, x=x), what)
    if recurrent(supports):
        module = make(causal=True)
        x = make.input(2, 0)
        _require_reached(module.prefill(x, module.init_state(2))[0], x, "prefill(0)")
        for batch, plan in ((0, [("prefill", 3), ("step", 2)]), (2, [("prefill", 0)])):
            x = make.input(batch, sum(n for _, n in plan))
            y, state = unroll(module, x, plan)
            what = f"{describe(plan)} of batch {batch}"
            require(y.shape == x.shape, f"{what}: output has shape {list(y.shape)}")
            more = make.input(batch, 3, seed=1)
            y, _ = unroll(module, more, [("prefill", 2), ("step", 1)], state)
            assert_close(y, module(more), f"continued after {what}")


def _require_reached(y: torch.Tensor, x: torch.Tensor, what: str) -> None:
    """Fail if the output is not connected to the input in the graph, since `backward` would then raise."""
    gradient = None
    if y.requires_grad:
        (gradient,) = torch.autograd.grad(y.sum(), x, allow_unused=True, retain_graph=True)
    require(gradient is not None, f"{what}: the output is not connected to x, so there is no gradient of x")
