"""Dispatch of the causal convolution to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType
from typing import Any

from torch import Tensor

from unrolled.ops.conv import native, plain, triton
from unrolled.ops.dispatch import choose
from unrolled.ops.observing import transforming
from unrolled.ops.operators import register

BACKENDS = {"triton": triton, "native": native, "plain": plain}  # the fastest first


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Compute `y` and the state after the last token, for checked inputs."""
    form = plain.forward if transforming() or _chosen(x, weight, bias, state) is plain else _operator
    y, after = form(x, weight, bias, state, cu_seqlens, silu)
    return y, after


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> ModuleType:
    return choose(BACKENDS, None, x, x, weight, bias, state)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    y, after = _chosen(*arguments[:4]).forward(*arguments)
    return y, after


def _backward(grad_y: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    found: list[Tensor] = _chosen(*arguments[:4]).backward(grad_y, grad_state, *arguments)
    return found


def _like_outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _like_gradients(grad_y: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    return [grad_y.new_empty(0) if x is None else x.new_empty(x.shape) for x in arguments[:4]]


_operator = register(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor state, Tensor? cu_seqlens, bool silu)"
    " -> (Tensor, Tensor)",
    "causal_conv_backward(Tensor grad_y, Tensor grad_state, Tensor x, Tensor weight, Tensor? bias,"
    " Tensor state, Tensor? cu_seqlens, bool silu) -> Tensor[]",
    _forward,
    _backward,
    plain.forward,
    like_outputs=_like_outputs,
    like_gradients=_like_gradients,
    n_inputs=4,
    n_tensors=5,
    n_outputs=2,
)
