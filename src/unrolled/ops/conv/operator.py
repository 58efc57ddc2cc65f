"""The causal convolution: dispatches to the native form, one torch operator, or to the plain form."""

from typing import Any

from torch import Tensor

from unrolled.ops.checks import transforming
from unrolled.ops.conv import native, plain
from unrolled.ops.dispatch import prefers
from unrolled.ops.operators import register


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `y` and the state after the last token, for checked inputs."""
    if transforming() or not prefers("native") or not native.supports(x):
        return plain.forward(x, weight, state, cu_seqlens)
    y, after = _operator(x, weight, state, cu_seqlens)
    return y, after


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    return native.forward(*arguments)


def _backward(*arguments: Any) -> list[Tensor]:
    return native.backward(*arguments)


def _plain(*arguments: Any) -> tuple[Tensor, Tensor]:
    return plain.forward(*arguments)


def _like_outputs(x: Tensor, weight: Tensor, state: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _like_gradients(
    grad_y: Tensor, grad_state: Tensor, x: Tensor, weight: Tensor, state: Tensor, *_: object
) -> list[Tensor]:
    return [y.new_empty(y.shape) for y in (x, weight, state)]


_operator = register(
    "causal_conv(Tensor x, Tensor weight, Tensor state, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    "causal_conv_backward(Tensor grad_y, Tensor grad_state, Tensor x, Tensor weight, Tensor state,"
    " Tensor? cu_seqlens) -> Tensor[]",
    _forward,
    _backward,
    _plain,
    like_outputs=_like_outputs,
    like_gradients=_like_gradients,
    n_inputs=3,
    n_tensors=4,
    n_outputs=2,
)
