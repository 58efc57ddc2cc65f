"""The causal convolution: dispatches to the native form, one torch operator, or to the plain form."""

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


def _like_outputs(x: Tensor, weight: Tensor, state: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


_operator = register(
    "causal_conv(Tensor x, Tensor weight, Tensor state, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    "causal_conv_backward(Tensor grad_y, Tensor grad_state, Tensor x, Tensor weight, Tensor state,"
    " Tensor? cu_seqlens) -> Tensor[]",
    native.forward,
    native.backward,
    plain.forward,
    like_outputs=_like_outputs,
    n_inputs=3,
    n_tensors=4,
    n_outputs=2,
)
