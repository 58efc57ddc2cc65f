"""Dispatch of the delta rule to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType
from typing import Any

from torch import Tensor

from unrolled.ops.checks import inferring, transforming
from unrolled.ops.delta import chunked, native, packed, triton
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.dispatch import choose, prefers
from unrolled.ops.operators import register
from unrolled.ops.precision import promoted

BACKENDS = {"triton": triton, "native": native, "plain": packed}  # the fastest first


def delta_rule(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `o` and the state after the last token, for checked inputs."""
    q, k, v = promoted(inputs.q, inputs.k, inputs.v)
    inputs = inputs._replace(q=q, k=k, v=v)
    if transforming() or _chosen(inputs) is packed:
        return packed.forward(inputs, cu_seqlens)
    o, state = _operator(*inputs, cu_seqlens)
    return o, state


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `o` and the new state for one checked token. The kernel runs in eager inference only."""
    q, k, v = promoted(q, k, v)
    if inferring(q, k, v, beta, state, log_decay) and prefers("native") and native.supports(q, v):
        return native.step(q, k, v, beta, state, log_decay)
    return chunked.step(q, k, v, beta, state, log_decay)


def _chosen(inputs: Inputs) -> ModuleType:
    # Triton has no kernels for a gate of every channel.
    backends = {name: x for name, x in BACKENDS.items() if name != "triton" or not inputs.by_channel}
    return choose(backends, None, inputs.q, inputs.q, inputs.v)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*arguments[:6])
    o, state = _chosen(inputs).forward(inputs, arguments[6])
    return o, state


def _backward(grad_o: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = Inputs(*arguments[:6])
    found: list[Tensor] = _chosen(inputs).backward(grad_o, grad_state, inputs, arguments[6])
    return found


def _plain(*arguments: Any) -> tuple[Tensor, Tensor]:
    return packed.forward(Inputs(*arguments[:6]), arguments[6])


def _like_outputs(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[3]), state.new_empty(state.shape)


def _like_gradients(grad_o: Tensor, grad_state: Tensor, *arguments: Tensor | None) -> list[Tensor]:
    none = grad_o.new_empty(0).double()
    return [none if x is None else x.new_empty(x.shape) for x in arguments[:6]]


_operator = register(
    "delta_rule_kernels(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay, Tensor state,"
    " Tensor? cu_seqlens) -> (Tensor, Tensor)",
    "delta_rule_kernels_backward(Tensor grad_o, Tensor grad_state, Tensor q, Tensor k, Tensor v, Tensor beta,"
    " Tensor? log_decay, Tensor state, Tensor? cu_seqlens) -> Tensor[]",
    _forward,
    _backward,
    _plain,
    like_outputs=_like_outputs,
    like_gradients=_like_gradients,
    n_inputs=6,
    n_tensors=7,
    n_outputs=2,
)
