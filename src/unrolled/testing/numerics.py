"""Dtypes of the outputs, and the errors allowed in half precision."""

import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Supports
from unrolled.ops.dispatch import prefer
from unrolled.testing._kit import Maker, assert_finite, normal, recurrent, require, unroll, with_gradients

HALF = (torch.bfloat16, torch.float16)

LENGTH = 320
"""Long enough that a sum accumulated in bf16 would stop growing: from 256 on, adding 1 changes nothing."""


def check_dtypes(make: Maker, supports: Supports) -> None:
    """The output has the type of the input, in every method."""
    for dtype in (torch.float64, torch.float32, *HALF):
        x = make.input(2, 5, dtype=dtype)
        for causal, module in replace(make, dtype=dtype).each_direction(supports):
            y = module(x)
            require(y.dtype == dtype, f"causal={causal}: forward of {dtype} gives {y.dtype}")
            if causal and recurrent(supports):
                y, state = module.prefill(x, module.init_state(2))
                require(y.dtype == dtype, f"prefill of {dtype} gives {y.dtype}")
                y, _ = module.step(x[:, 0], state)
                require(y.dtype == dtype, f"step of {dtype} gives {y.dtype}")


def check_half_precision(make: Maker, supports: Supports) -> None:
    """bf16, fp16 and autocast: finite outputs and gradients, and an error that rounding explains.

    The allowed error is measured: it is the effect of rounded inputs and weights on the exact function. The
    fp64 mechanism runs with every input and weight perturbed by the unit of rounding, up or down at random.
    At every position, the error in half precision may be twice the change that this causes (root mean square
    over rows and features): once for rounded inputs and weights, once for rounding within the computation.

    A mechanism that selects keys is discontinuous where two choices are nearly equal, and a few perturbations
    may miss such a point. So where the error is larger than allowed, more perturbations are tried, and the
    largest change counts.
    """
    for dtype in HALF:
        for causal, module in replace(make, dtype=dtype).each_direction(supports):
            exact = copy.deepcopy(module).double()
            x = make.input(2, LENGTH, dtype=dtype)
            with torch.no_grad(), prefer("plain"):
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
    """Allowed error of each position: twice the effect of perturbing every input and parameter by `unit`."""

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
        with prefer("plain"):
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
