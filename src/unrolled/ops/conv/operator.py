"""Dispatch of the causal convolution to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType
from typing import Any

from torch import Tensor

from unrolled.ops.checks import transforming
from unrolled.ops.conv import native, plain, triton
from unrolled.ops.dispatch import choose
from unrolled.ops.operators import register

BACKENDS = {"triton": triton, "native": native, "plain": plain}  # the fastest first


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `y` and the state after the last token, for checked inputs."""
    if transforming() or _chosen(x, weight, state) is plain:
        return plain.forward(x, weight, state, cu_seqlens)
    y, after = _operator(x, weight, state, cu_seqlens)
    return y, after


def _chosen(x: Tensor, weight: Tensor, state: Tensor) -> ModuleType:
    return choose(BACKENDS, None, x, x, weight, state)


def _forward(x: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    y, after = _chosen(x, weight, state).forward(x, weight, state, cu_seqlens)
    return y, after


def _backward(grad_y: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    found: list[Tensor] = _chosen(*arguments[:3]).backward(grad_y, grad_state, *arguments)
    return found


def _like_outputs(x: Tensor, weight: Tensor, state: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


_operator = register(
    "causal_conv(Tensor x, Tensor weight, Tensor state, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    "causal_conv_backward(Tensor grad_y, Tensor grad_state, Tensor x, Tensor weight, Tensor state,"
    " Tensor? cu_seqlens) -> Tensor[]",
    _forward,
    _backward,
    plain.forward,
    like_outputs=_like_outputs,
    n_inputs=3,
    n_tensors=4,
    n_outputs=2,
)
