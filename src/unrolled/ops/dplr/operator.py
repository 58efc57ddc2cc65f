"""Dispatch of `dplr` to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType
from typing import Any

from torch import Tensor

from unrolled.ops.checks import inferring, transforming
from unrolled.ops.dispatch import choose, prefers
from unrolled.ops.dplr import chunked, native, packed
from unrolled.ops.dplr.chunked import Inputs
from unrolled.ops.operators import register
from unrolled.ops.precision import promoted

BACKENDS = {"native": native, "plain": packed}  # the fastest first


def dplr(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `o` and the state after the last token, for checked inputs."""
    inputs = _promoted(inputs)
    if transforming() or _chosen(inputs) is packed:
        return packed.forward(inputs, cu_seqlens)
    o, state = _operator(*inputs, cu_seqlens)
    return o, state


def dplr_step(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `o` and the new state for one checked token. The kernel runs in eager inference only."""
    inputs = _promoted(inputs)
    if inferring(*inputs) and prefers("native") and native.supports(inputs.q, inputs.v):
        return native.step(inputs)
    return chunked.step(*inputs)


def _promoted(inputs: Inputs) -> Inputs:
    return Inputs._make((*promoted(*inputs[:5]), *inputs[5:]))


def _chosen(inputs: Inputs) -> ModuleType:
    return choose(BACKENDS, None, inputs.q, inputs.q, inputs.v)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*arguments[:7])
    o, state = _chosen(inputs).forward(inputs, arguments[7])
    return o, state


def _backward(grad_o: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = Inputs(*arguments[:7])
    found: list[Tensor] = _chosen(inputs).backward(grad_o, grad_state, inputs, arguments[7])
    return found


def _plain(*arguments: Any) -> tuple[Tensor, Tensor]:
    return packed.forward(Inputs(*arguments[:7]), arguments[7])


def _like_outputs(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    v, state = arguments[2], arguments[6]
    return v.new_empty(v.shape), state.new_empty(state.shape)


_operator = register(
    "dplr_kernels(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor log_decay, Tensor state,"
    " Tensor? cu_seqlens) -> (Tensor, Tensor)",
    "dplr_kernels_backward(Tensor grad_o, Tensor grad_state, Tensor q, Tensor k, Tensor v, Tensor a,"
    " Tensor b, Tensor log_decay, Tensor state, Tensor? cu_seqlens) -> Tensor[]",
    _forward,
    _backward,
    _plain,
    like_outputs=_like_outputs,
    n_inputs=7,
    n_tensors=8,
    n_outputs=2,
)
