"""Window attention as one torch operator, which dispatches to the backends; flex has its own derivatives."""

from typing import Any, Protocol

from torch import Tensor

from unrolled.ops.dispatch import check_backend, choose
from unrolled.ops.node import like_attention_and_lse
from unrolled.ops.observing import transforming
from unrolled.ops.operators import register
from unrolled.ops.window import blocks, flex, native
from unrolled.ops.window.blocks import Inputs, Options


class Backend(Protocol):
    """The functions of the module of a backend."""

    def supports(self, inputs: Inputs) -> bool:
        """Whether it can run these inputs."""

    def forward(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        """Compute `o [B,T,H,M]` in the dtype of `v` and `lse [B,T,H]` in the accumulation dtype."""

    def backward(
        self, grad_o: Tensor, grad_lse: Tensor, inputs: Inputs, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of `q`, `k` and `v`."""


OF_OPERATOR: dict[str, Backend] = {"native": native, "plain": blocks}
BACKENDS: dict[str, Any] = {"flex": flex, **OF_OPERATOR}  # the fastest first


def window_attention(inputs: Inputs, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """Compute `o` and `lse` for checked inputs of one type, with finite keys and values in the padding."""
    check_backend(backend, BACKENDS)
    if transforming():
        return blocks.forward(inputs, options)
    if inputs.q.is_cuda and choose(BACKENDS, backend, inputs.q, inputs) is flex:
        return flex.forward(inputs, options)
    cu_seqlens, window_size, scale = options
    o, lse = _operator(*inputs, cu_seqlens, *window_size, scale, backend)
    return o, lse


def _split(*arguments: object) -> tuple[Inputs, Options]:
    *tensors, cu_seqlens, left, right, scale, _ = arguments
    return Inputs._make(tensors), Options._make((cu_seqlens, (left, right), scale))


def _forward(*arguments: object) -> tuple[Tensor, Tensor]:
    inputs, options = _split(*arguments)
    return choose(OF_OPERATOR, arguments[-1], inputs.q, inputs).forward(inputs, options)


def _backward(grad_o: Tensor, grad_lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, cu_seqlens, lse, left, right, scale, backend = arguments
    inputs = Inputs(*tensors)
    chosen = choose(OF_OPERATOR, backend, inputs.q, inputs)
    return chosen.backward(grad_o, grad_lse, inputs, lse, Options(cu_seqlens, (left, right), scale))


_operator = register(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor? key_padding_mask, Tensor? cu_seqlens,"
    " SymInt left, SymInt right, float scale, str? backend) -> (Tensor, Tensor)",
    "window_attention_backward(Tensor grad_o, Tensor grad_lse, Tensor q, Tensor k, Tensor v,"
    " Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor lse,"
    " SymInt left, SymInt right, float scale, str? backend) -> Tensor[]",
    _forward,
    _backward,
    lambda *arguments: blocks.forward(*_split(*arguments)),
    like_outputs=like_attention_and_lse,
    n_inputs=3,
    n_tensors=5,
    n_outputs=2,
    saved_outputs=[1],  # lse
)
