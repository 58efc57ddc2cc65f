"""The door of window attention: one torch operator, behind which the form to run is chosen.

Being one operator, `torch.compile` and `torch.export` see a single node, and autograd a single formula.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unrolled.ops import window_blocks
from unrolled.ops.checks import transforming
from unrolled.ops.kernels import window_flex, window_native
from unrolled.ops.kernels.door import check_backend, choose, differentiable_gradients
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.window_blocks import Inputs


class Form(Protocol):
    """What each implementation offers, as functions of a module."""

    def supports(self, inputs: Inputs) -> bool:
        """Whether it can run these inputs."""

    def forward(
        self, inputs: Inputs, cu_seqlens: Tensor | None, window_size: tuple[int, int], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute `o [B,T,H,M]` in the type of `v` and `lse [B,T,H]` in the accumulation type."""

    def backward(
        self,
        grad_o: Tensor,
        grad_lse: Tensor,
        inputs: Inputs,
        cu_seqlens: Tensor | None,
        lse: Tensor,
        window_size: tuple[int, int],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of `q`, `k` and `v`."""


FORMS: dict[str, Form] = {  # the fastest first
    "flex": window_flex,
    "native": window_native,
    "plain": window_blocks,
}
BACKENDS = tuple(FORMS)


def window_attention(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    window_size: tuple[int, int],
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Compute `o` and `lse` for checked inputs of one type, with finite keys and values in the padding."""
    check_backend(backend, FORMS)
    if transforming():
        return window_blocks.forward(inputs, cu_seqlens, window_size, scale)
    o, lse = _operator(*inputs, cu_seqlens, *window_size, scale, backend)
    return o, lse


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    left: int,
    right: int,
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(q, k, v, key_padding_mask)
    form: Form = choose(FORMS, backend, q, inputs)
    o, lse = form.forward(inputs, cu_seqlens, (left, right), scale)
    return o.contiguous(), lse.contiguous()


def _backward(
    grad_o: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    lse: Tensor,
    left: int,
    right: int,
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, key_padding_mask)
    form: Form = choose(FORMS, backend, q, inputs)
    dq, dk, dv = form.backward(grad_o, grad_lse, inputs, cu_seqlens, lse, (left, right), scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


_operator = torch.library.custom_op("unrolled::window_attention", _forward, mutates_args=())
_backward_operator = torch.library.custom_op(
    "unrolled::window_attention_backward", _backward, mutates_args=()
)


@_operator.register_fake
def _(q, k, v, *_):  # type: ignore[no-untyped-def]
    B, T, H, _ = q.shape
    return v.new_empty(B, T, H, v.shape[3]), q.new_empty(B, T, H, dtype=accumulation_dtype(q.dtype))


@_backward_operator.register_fake
def _(grad_o, grad_lse, q, k, v, *_):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.left, ctx.right, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradient(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, key_padding_mask, cu_seqlens, lse = ctx.saved_tensors
    grads, window_size = (grad_o, grad_lse), (ctx.left, ctx.right)
    found: Sequence[Tensor | None]
    if torch.is_grad_enabled():  # create_graph=True

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return window_blocks.forward(
                Inputs(q, k, v, key_padding_mask), cu_seqlens, window_size, ctx.scale
            )

        found = differentiable_gradients(run, (q, k, v), grads)
    else:
        inputs = (q, k, v, key_padding_mask)
        found = _backward_operator(*grads, *inputs, cu_seqlens, lse, *window_size, ctx.scale, ctx.backend)
    return *found, None, None, None, None, None, None


_operator.register_autograd(_gradient, setup_context=_keep_for_backward)
