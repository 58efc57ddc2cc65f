"""The door of window attention: one torch operator, behind which the form to run is chosen.

Being one operator, `torch.compile` and `torch.export` see a single node, and autograd a single formula.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from unrolled.ops import window_blocks
from unrolled.ops.checks import transforming
from unrolled.ops.kernels import window_flex
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


FORMS: dict[str, Form] = {"flex": window_flex, "plain": window_blocks}  # the fastest first
BACKENDS = tuple(FORMS)


def window_attention(
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    window_size: tuple[int, int],
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Compute `o` and `lse` for checked inputs of one type, with finite keys and values in the padding."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}, but must be None for the fastest or one of {', '.join(BACKENDS)}"
        )
    if transforming():
        return window_blocks.forward(inputs, cu_seqlens, window_size, scale)
    o, lse = _operator(*inputs, cu_seqlens, *window_size, scale, backend)
    return o, lse


def _form(inputs: Inputs, backend: str | None) -> Form:
    for name, form in FORMS.items():
        if backend in (None, name) and form.supports(inputs):
            return form
    found = f"{inputs.q.dtype} tensors of these shapes on {inputs.q.device}"
    raise ValueError(f"backend is {backend!r}, which cannot run {found}; None takes one that can")


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
    o, lse = _form(inputs, backend).forward(inputs, cu_seqlens, (left, right), scale)
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
    form = _form(inputs, backend)
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
    *inputs, cu_seqlens, lse = ctx.saved_tensors
    options = (ctx.left, ctx.right, ctx.scale)
    if torch.is_grad_enabled():  # create_graph=True
        found = _differentiable_gradients((grad_o, grad_lse), Inputs(*inputs), cu_seqlens, *options)
    else:
        found = _backward_operator(grad_o, grad_lse, *inputs, cu_seqlens, lse, *options, ctx.backend)
    return *found, None, None, None, None, None, None


def _differentiable_gradients(
    grads: tuple[Tensor, Tensor],
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """Differentiate the plain form, which is made of differentiable operations: right to any order.

    With respect to aliases: an input may itself be made from another one, and autograd adds up those paths.
    """
    q, k, v = aliases = [x.view_as(x) for x in (inputs.q, inputs.k, inputs.v)]
    outputs = window_blocks.forward(
        Inputs(q, k, v, inputs.key_padding_mask), cu_seqlens, (left, right), scale
    )
    wanted = [x for x in aliases if x.requires_grad]
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if pairs:
        ys, gs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, gs, create_graph=True, materialize_grads=True))
    else:  # no query can reach a key
        found = iter([torch.zeros_like(x) for x in wanted])
    return tuple(next(found) if x.requires_grad else None for x in aliases)


_operator.register_autograd(_gradient, setup_context=_keep_for_backward)
