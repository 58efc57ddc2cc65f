"""Linear attention with a gate for every feature as one torch operator, which dispatches to the backends."""

from types import ModuleType

from torch import Tensor

from unrolled.ops.dispatch import choose, prefers
from unrolled.ops.gla import chunked, native, packed, triton
from unrolled.ops.gla.packed import Inputs
from unrolled.ops.observing import inferring, transforming
from unrolled.ops.precision import promoted
from unrolled.ops.recurrence import register_recurrence

BACKENDS = {"triton": triton, "native": native, "plain": packed}  # the fastest first


def diagonal_linear_attention(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `o` and the state after the last key, for checked inputs of one dtype with T = S."""
    if transforming():
        return packed.forward(inputs, cu_seqlens)
    o, state = _operator(*inputs, cu_seqlens)
    return o, state


def diagonal_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `o` and the new state for one checked token. The kernel runs in eager inference only."""
    dtype = v.dtype
    q, k, v = promoted(q, k, v)
    if inferring(q, k, v, log_decay, state) and prefers("native") and native.supports(q, v):
        o, after = native.step(q, k, v, log_decay, state)
    else:
        o, after = chunked.step(q, k, v, log_decay, state)
    return o.to(dtype), after


def _chosen(inputs: Inputs) -> ModuleType:
    return choose(BACKENDS, None, inputs.q, inputs.q, inputs.v)


_operator = register_recurrence(
    "diagonal_linear_attention",
    "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor state, Tensor? cu_seqlens",
    Inputs,
    _chosen,
    packed.forward,
)
