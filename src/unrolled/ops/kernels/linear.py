"""The door of linear attention: one torch operator, behind which the form to run is chosen.

Being one operator, `torch.compile` and `torch.export` see a single node, and autograd a single formula.
"""

from typing import Any

import torch
from torch import Tensor

from unrolled.ops import linear_chunked, linear_packed
from unrolled.ops.checks import transforming
from unrolled.ops.linear_chunked import Inputs

BACKENDS = ("plain",)


def linear_attention(
    inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o` and the state after the last key, for checked inputs of one type, with T = S if causal."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}, but must be None for the fastest or one of {', '.join(BACKENDS)}"
        )
    run = _plain if transforming() else _operator
    o, kv, k_sum, _ = run(*inputs, cu_seqlens, causal, normalize)
    return o, kv, k_sum


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, log_decay, kv, k_sum)
    if cu_seqlens is None:
        found = linear_chunked.forward(inputs, causal, normalize)
    else:
        found = linear_packed.forward(inputs, cu_seqlens, causal, normalize)
    o, kv_end, k_sum_end, den = (x.contiguous() for x in found)
    return o, kv_end, k_sum_end, den


def _plain_backward(
    grad_o: Tensor,
    grad_kv: Tensor,
    grad_k_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    den: Tensor,
    causal: bool,
    normalize: bool,
) -> list[Tensor]:
    grads, inputs = (grad_o, grad_kv, grad_k_sum), Inputs(q, k, v, log_decay, kv, k_sum)
    if cu_seqlens is None:
        found = linear_chunked.backward(*grads, inputs, den, causal, normalize)
    else:
        found = linear_packed.backward(*grads, inputs, cu_seqlens, den, causal, normalize)
    return [gradient.contiguous() for gradient in found]


_operator = torch.library.custom_op("unrolled::linear_attention", _plain, mutates_args=())
_backward_operator = torch.library.custom_op(
    "unrolled::linear_attention_backward", _plain_backward, mutates_args=()
)


@_operator.register_fake
def _(q, k, v, log_decay, kv, k_sum, cu_seqlens, causal, normalize):  # type: ignore[no-untyped-def]
    return linear_packed.like_outputs(Inputs(q, k, v, log_decay, kv, k_sum), cu_seqlens, normalize)


@_backward_operator.register_fake
def _(grad_o, grad_kv, grad_k_sum, q, k, v, log_decay, kv, k_sum, *_):  # type: ignore[no-untyped-def]
    inputs = Inputs(q, k, v, log_decay, kv, k_sum)
    return list(linear_packed.like_gradients(grad_kv, grad_k_sum, inputs))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.normalize = inputs
    ctx.save_for_backward(*tensors, output[3])


def _gradient(ctx: Any, grad_o: Tensor, grad_kv: Tensor, grad_k_sum: Tensor, _: Tensor) -> tuple[Any, ...]:
    *inputs, cu_seqlens, den = ctx.saved_tensors
    grads = (grad_o, grad_kv, grad_k_sum)
    if torch.is_grad_enabled():  # create_graph=True
        found = _differentiable_gradients(grads, Inputs(*inputs), cu_seqlens, ctx.causal, ctx.normalize)
    else:
        found = _backward_operator(*grads, *inputs, cu_seqlens, den, ctx.causal, ctx.normalize)
    return *(None if x is None else g for x, g in zip(inputs, found, strict=True)), None, None, None


def _differentiable_gradients(
    grads: tuple[Tensor, ...], inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool
) -> list[Tensor | None]:
    """Differentiate the plain form, which is made of differentiable operations: right to any order.

    With respect to aliases: an input may itself be made from another one, and autograd adds up those paths.
    """
    inputs = Inputs(*(None if x is None else x.view_as(x) for x in inputs))  # type: ignore[arg-type]
    outputs = _plain(*inputs, cu_seqlens, causal, normalize)[:3]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if pairs:
        ys, gs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, gs, create_graph=True, materialize_grads=True))
    else:  # a pack of no sequences
        found = iter([torch.zeros_like(x) for x in wanted])
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


_operator.register_autograd(_gradient, setup_context=_keep_for_backward)
