"""Types in and out, and what half precision may cost."""

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Supports
from unrolled.testing._kit import (
    Maker,
    assert_finite,
    directions,
    normal,
    recurrent,
    require,
    unroll,
    with_gradients,
)

HALF = (torch.bfloat16, torch.float16)

LENGTH = 600
"""Long enough for a sum that is kept in bf16 to stand still: from 256 on, adding 1 changes nothing."""


def check_dtypes(make: Maker, supports: Supports) -> None:
    """The output has the type of the input, in every verb."""
    for dtype in (torch.float64, torch.float32, *HALF):
        for causal in directions(supports):
            y = make(causal=causal, dtype=dtype)(make.input(2, 5, dtype=dtype))
            require(y.dtype == dtype, f"causal={causal}: forward of {dtype} gives {y.dtype}")
        if recurrent(supports):
            module = make(causal=True, dtype=dtype)
            x = make.input(2, 5, dtype=dtype)
            y, state = module.prefill(x, module.init_state(2))
            require(y.dtype == dtype, f"prefill of {dtype} gives {y.dtype}")
            y, _ = module.step(x[:, 0], state)
            require(y.dtype == dtype, f"step of {dtype} gives {y.dtype}")


def check_half_precision(make: Maker, supports: Supports) -> None:
    """bf16, fp16 and autocast: finite with finite gradients, and an error that rounding explains.

    A computation is as good as its type allows when its error is about what rounding the inputs and
    weights does to the exact function. That is measured: the fp64 mechanism runs with every input and weight
    moved by the unit of rounding, up or down at random. At every position, half precision may be off by
    twice that move (root mean square over rows and features): one share for the rounding of what goes in,
    one for what the computation rounds itself.

    A mechanism that chooses what it reads jumps where two choices are nearly equal, and few moves may miss a
    jump. So where the error is larger, the exact function is moved more often, and the largest move counts.
    """
    for dtype in HALF:
        for causal in directions(supports):
            module = make(causal=causal, dtype=dtype)
            exact = copy.deepcopy(module).double()
            x = make.input(2, LENGTH, dtype=dtype)
            with torch.no_grad():
                expected = exact(x.double())
            allowed = _Allowed(exact, x, expected, torch.finfo(dtype).eps / 2)
            y = module(x)
            _assert_within(y, expected, allowed, f"causal={causal}: {dtype} forward")
            assert_finite(with_gradients(module, y, x=x), f"causal={causal}: {dtype}")
            if causal and recurrent(supports):
                with torch.no_grad():
                    y, _ = unroll(module, x, [("prefill", LENGTH - 20), ("step", 20)])
                _assert_within(y, expected, allowed, f"{dtype} prefill({LENGTH - 20}) + step(20)")
            if dtype == torch.bfloat16:
                single = copy.deepcopy(module).float()
                x = x.detach().float().requires_grad_()
                with torch.autocast("cpu", dtype=dtype):
                    y = single(x)
                _assert_within(y, expected, allowed, f"causal={causal}: fp32 under {dtype} autocast")
                assert_finite(with_gradients(single, y, x=x), f"causal={causal}: fp32 under {dtype} autocast")


class _Allowed:
    """How far each position may be off: twice what moving every input and parameter by `unit` does to it."""

    def __init__(self, exact: Any, x: Tensor, expected: Tensor, unit: float):
        self.exact, self.x, self.expected, self.unit = exact, x.detach().double(), expected, unit

    @cached_property
    def typical(self) -> Tensor:
        return 2 * torch.stack([self._move(seed) for seed in range(4)]).square().mean(0).sqrt()

    @cached_property
    def largest(self) -> Tensor:
        return 2 * torch.stack([self._move(seed) for seed in range(4, 36)]).amax(0)

    @torch.no_grad()
    def _move(self, seed: int) -> Tensor:
        moved = copy.deepcopy(self.exact)
        for i, parameter in enumerate(moved.parameters()):
            parameter *= 1 + self.unit * normal(*parameter.shape, seed=100 * seed + i).sign()
        x = self.x * (1 + self.unit * normal(*self.x.shape, seed=seed).sign())
        return _size(moved(x) - self.expected)


def _size(difference: Tensor) -> Tensor:
    return difference.square().mean((0, 2)).sqrt()


def _assert_within(found: Tensor, expected: Tensor, allowed: _Allowed, what: str) -> None:
    assert_finite(found, what)
    error, limit = _size(found.detach().double() - expected), allowed.typical
    if bool((error > limit).any()):
        limit = torch.maximum(limit, allowed.largest)
    worst = int((error / limit).argmax())
    require(
        bool(error[worst] <= limit[worst]),
        f"{what}: at position {worst} it differs from fp64 by {float(error[worst]):.3g} (root mean square), "
        f"rounding explains {float(limit[worst]):.3g}",
    )
