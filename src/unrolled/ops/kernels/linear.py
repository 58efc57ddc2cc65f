"""The door of linear attention: one torch operator, behind which the form to run is chosen.

Being one operator, `torch.compile` and `torch.export` see a single node, and autograd a single formula.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from unrolled.ops import linear_chunked, linear_packed
from unrolled.ops.checks import inferring, transforming
from unrolled.ops.feature_maps import FeatureMap
from unrolled.ops.kernels import linear_native, linear_triton
from unrolled.ops.kernels.door import check_backend, choose, differentiable_gradients, prefers
from unrolled.ops.linear_chunked import Inputs
from unrolled.ops.precision import promoted


class Form(Protocol):
    """What each implementation offers, as functions of a module."""

    def supports(self, q: Tensor, v: Tensor) -> bool:
        """Whether it can run inputs of this type and these widths, on this device."""

    def forward(
        self, inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute `o`, the state after the last key, and the divisor."""

    def backward(
        self,
        grad_o: Tensor,
        grad_kv: Tensor,
        grad_k_sum: Tensor,
        inputs: Inputs,
        cu_seqlens: Tensor | None,
        den: Tensor,
        causal: bool,
        normalize: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute the gradients of the inputs; an absent `log_decay` gets an empty one."""


FORMS: dict[str, Form] = {  # the fastest first
    "triton": linear_triton,
    "native": linear_native,
    "plain": linear_packed,
}
BACKENDS = tuple(FORMS)
STEPS = {"triton": linear_triton, "native": linear_native}  # those with a step of their own, likewise


def linear_attention(
    inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o` and the state after the last key, for checked inputs of one type, with T = S if causal."""
    check_backend(backend, FORMS)
    if transforming():
        return linear_packed.forward(inputs, cu_seqlens, causal, normalize)[:3]
    o, kv, k_sum, _ = _operator(*inputs, cu_seqlens, causal, normalize, backend)
    return o, kv, k_sum


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    k_sum: Tensor,
    log_decay: Tensor | None,
    normalize: bool,
    feature_map: FeatureMap | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o` and the new state for one checked token, whose q and k a `feature_map` has yet to map.

    The kernels have no gradient and are no torch operators, whose dispatch would cost more than they do: they
    run in eager inference. Otherwise the plain form does, which `torch.compile` fuses.
    """
    eager = inferring(q, k, v, kv, k_sum, log_decay)
    fusible = q.dtype == k.dtype == v.dtype and type(feature_map) in linear_native.FEATURE_MAPS
    if eager and fusible and prefers("native") and linear_native.supports(q, v):
        return linear_native.step(q, k, v, kv, k_sum, log_decay, normalize, feature_map)
    if feature_map is not None:
        q, k = feature_map.phi_q(q), feature_map.phi_k(k)
    out_dtype = v.dtype
    q, k, v = promoted(q, k, v)
    kernels = (form for name, form in STEPS.items() if prefers(name) and form.supports(q, v))
    form = next(kernels, linear_chunked) if eager else linear_chunked
    o, kv, k_sum = form.step(q, k, v, kv, k_sum, log_decay, normalize)
    return o.to(out_dtype), kv, k_sum


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    normalize: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, log_decay, kv, k_sum)
    form: Form = choose(FORMS, backend, q, q, v)
    o, kv_end, k_sum_end, den = form.forward(inputs, cu_seqlens, causal, normalize)
    return o.contiguous(), kv_end.contiguous(), k_sum_end.contiguous(), den.contiguous()


def _backward(
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
    backend: str | None,
) -> list[Tensor]:
    grads, inputs = (grad_o, grad_kv, grad_k_sum), Inputs(q, k, v, log_decay, kv, k_sum)
    form: Form = choose(FORMS, backend, q, q, v)
    return [g.contiguous() for g in form.backward(*grads, inputs, cu_seqlens, den, causal, normalize)]


_operator = torch.library.custom_op("unrolled::linear_attention", _forward, mutates_args=())
_backward_operator = torch.library.custom_op(
    "unrolled::linear_attention_backward", _backward, mutates_args=()
)


@_operator.register_fake
def _(q, k, v, log_decay, kv, k_sum, cu_seqlens, causal, normalize, backend):  # type: ignore[no-untyped-def]
    return linear_packed.like_outputs(Inputs(q, k, v, log_decay, kv, k_sum), cu_seqlens, normalize)


@_backward_operator.register_fake
def _(grad_o, grad_kv, grad_k_sum, q, k, v, log_decay, kv, k_sum, *_):  # type: ignore[no-untyped-def]
    inputs = Inputs(q, k, v, log_decay, kv, k_sum)
    return list(linear_packed.like_gradients(grad_kv, grad_k_sum, inputs))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.normalize, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[3])


def _gradient(ctx: Any, grad_o: Tensor, grad_kv: Tensor, grad_k_sum: Tensor, _: Tensor) -> tuple[Any, ...]:
    *inputs, cu_seqlens, den = ctx.saved_tensors
    grads, options = (grad_o, grad_kv, grad_k_sum), (ctx.causal, ctx.normalize)
    found: list[Tensor | None]
    if torch.is_grad_enabled():  # create_graph=True

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            return linear_packed.forward(Inputs(*tensors), cu_seqlens, *options)[:3]

        found = differentiable_gradients(run, inputs, grads)
    else:
        found = _backward_operator(*grads, *inputs, cu_seqlens, den, *options, ctx.backend)
    return *(None if x is None else g for x, g in zip(inputs, found, strict=True)), None, None, None, None


_operator.register_autograd(_gradient, setup_context=_keep_for_backward)
