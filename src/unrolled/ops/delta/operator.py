"""Dispatch of the delta rule to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType

from torch import Tensor

from unrolled.ops.delta import chunked, native, packed, triton
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.dispatch import choose, prefers
from unrolled.ops.observing import inferring, transforming
from unrolled.ops.precision import promoted
from unrolled.ops.recurrence import register_recurrence

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
    # Triton has no kernels for a gate of every feature.
    backends = {name: x for name, x in BACKENDS.items() if name != "triton" or not inputs.by_feature}
    return choose(backends, None, inputs.q, inputs.q, inputs.v)


_operator = register_recurrence(
    "delta_rule_kernels",
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay, Tensor state, Tensor? cu_seqlens",
    Inputs,
    _chosen,
    packed.forward,
)
