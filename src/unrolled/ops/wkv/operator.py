"""Dispatch of the averages to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType
from typing import Any

from torch import Tensor

from unrolled.ops.dispatch import choose
from unrolled.ops.observing import inferring, transforming
from unrolled.ops.operators import register
from unrolled.ops.precision import promoted
from unrolled.ops.wkv import native, plain, triton
from unrolled.ops.wkv.plain import Inputs

BACKENDS = {"triton": triton, "native": native, "plain": plain}  # the fastest first


def wkv(inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `o` and the state after the last token, for checked inputs."""
    inputs = _promoted(inputs)
    if transforming() or _chosen(inputs) is plain:
        return plain.forward(inputs, padding, cu_seqlens)
    o, after = _operator(*inputs, padding, cu_seqlens)
    return o, after


def wkv_step(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `o` and the new state for one checked token. The kernels run in eager inference only."""
    inputs = _promoted(inputs)
    form = _chosen(inputs) if inferring(*inputs) else plain
    found: tuple[Tensor, Tensor] = form.forward(inputs, None, None)
    return found


def _promoted(inputs: Inputs) -> Inputs:
    k, v = promoted(inputs.k, inputs.v)
    return inputs._replace(k=k, v=v)


def _chosen(inputs: Inputs) -> ModuleType:
    return choose(BACKENDS, None, inputs.k, inputs)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*arguments[:5])
    o, after = _chosen(inputs).forward(inputs, *arguments[5:])
    return o, after


def _backward(grad_o: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = Inputs(*arguments[:5])
    found: list[Tensor] = _chosen(inputs).backward(grad_o, grad_state, inputs, *arguments[5:])
    return found


def _like_outputs(*arguments: Any) -> tuple[Tensor, Tensor]:
    v, state = arguments[1], arguments[4]
    return v.new_empty(v.shape), state.new_empty(state.shape)


_ARGUMENTS = (
    "Tensor k, Tensor v, Tensor log_decay, Tensor bonus, Tensor state, Tensor? padding, Tensor? cu_seqlens"
)

_operator = register(
    f"wkv_kernels({_ARGUMENTS}) -> (Tensor, Tensor)",
    f"wkv_backward(Tensor grad_o, Tensor grad_state, {_ARGUMENTS}) -> Tensor[]",
    _forward,
    _backward,
    lambda *arguments: plain.forward(Inputs(*arguments[:5]), *arguments[5:]),
    like_outputs=_like_outputs,
    n_inputs=5,
    n_tensors=7,
    n_outputs=2,
)
