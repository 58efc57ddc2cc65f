"""Dispatch of `dplr` to the kernels, as one torch operator, or to the plain form."""

from types import ModuleType

from torch import Tensor

from unrolled.ops.dispatch import choose, prefers
from unrolled.ops.dplr import chunked, native, packed
from unrolled.ops.dplr.chunked import Inputs
from unrolled.ops.observing import inferring, transforming
from unrolled.ops.precision import promoted
from unrolled.ops.recurrence import register_recurrence

BACKENDS = {"native": native, "plain": packed}  # the fastest first


def dplr(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `o` and the state after the last token, for checked inputs."""
    inputs = _promoted(inputs)
    if transforming() or _chosen(inputs) is packed:
        return packed.forward(inputs, cu_seqlens)
    o, state = _operator(*inputs, cu_seqlens)
    return o, state


def dplr_step(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `o` and the new state for one checked token. The kernel runs in eager inference only."""
    inputs = _promoted(inputs)
    if inferring(*inputs) and prefers("native") and native.supports(inputs.q, inputs.v):
        return native.step(inputs)
    return chunked.step(*inputs)


def _promoted(inputs: Inputs) -> Inputs:
    return Inputs._make((*promoted(*inputs[:5]), *inputs[5:]))


def _chosen(inputs: Inputs) -> ModuleType:
    return choose(BACKENDS, None, inputs.q, inputs.q, inputs.v)


_operator = register_recurrence(
    "dplr_kernels",
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor log_decay, Tensor state, Tensor? cu_seqlens",
    Inputs,
    _chosen,
    packed.forward,
)
