"""Dispatch of the selective scan to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType
from typing import Any

from torch import Tensor

from unrolled.ops.dispatch import choose
from unrolled.ops.observing import inferring, transforming
from unrolled.ops.operators import register
from unrolled.ops.precision import promoted
from unrolled.ops.selective_scan import native, plain
from unrolled.ops.selective_scan.plain import Inputs

BACKENDS = {"native": native, "plain": plain}  # the fastest first


def selective_scan(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `y` and the state after the last token, for checked inputs."""
    inputs = _promoted(inputs)
    if transforming() or _chosen(inputs) is plain:
        return plain.forward(inputs, cu_seqlens)
    y, after = _operator(*inputs, cu_seqlens)
    return y, after


def selective_scan_step(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `y` and the new state for one checked token. The kernels run in eager inference only."""
    inputs = _promoted(inputs)
    form = _chosen(inputs) if inferring(*inputs) else plain
    found: tuple[Tensor, Tensor] = form.step(inputs)
    return found


def _promoted(inputs: Inputs) -> Inputs:
    x, b, c = promoted(inputs.x, inputs.b, inputs.c)
    return inputs._replace(x=x, b=b, c=c)


def _chosen(inputs: Inputs) -> ModuleType:
    return choose(BACKENDS, None, inputs.x, inputs)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*arguments[:6])
    y, after = _chosen(inputs).forward(inputs, arguments[6])
    return y, after


def _backward(grad_y: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = Inputs(*arguments[:6])
    found: list[Tensor] = _chosen(inputs).backward(grad_y, grad_state, inputs, arguments[6])
    return found


def _like_outputs(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, state = arguments[0], arguments[5]
    return x.new_empty(x.shape), state.new_empty(state.shape)


_ARGUMENTS = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, Tensor? cu_seqlens"

_operator = register(
    f"selective_scan_kernels({_ARGUMENTS}) -> (Tensor, Tensor)",
    f"selective_scan_backward(Tensor grad_y, Tensor grad_state, {_ARGUMENTS}) -> Tensor[]",
    _forward,
    _backward,
    lambda *arguments: plain.forward(Inputs(*arguments[:6]), arguments[6]),
    like_outputs=_like_outputs,
    n_inputs=6,
    n_tensors=7,
    n_outputs=2,
)
