"""Linear attention with a gate for every feature as one torch operator, which dispatches to the backends."""

from types import ModuleType
from typing import Any

from torch import Tensor

from unrolled.ops.checks import inferring, transforming
from unrolled.ops.dispatch import choose, prefers
from unrolled.ops.gla import chunked, native, packed, triton
from unrolled.ops.gla.packed import Inputs
from unrolled.ops.operators import register
from unrolled.ops.precision import promoted

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


def _of(q: Tensor, v: Tensor) -> ModuleType:
    return choose(BACKENDS, None, q, q, v)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*arguments[:5])
    o, state = _of(inputs.q, inputs.v).forward(inputs, arguments[5])
    return o, state


def _backward(grad_o: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = Inputs(*arguments[:5])
    found: list[Tensor] = _of(inputs.q, inputs.v).backward(grad_o, grad_state, inputs, arguments[5])
    return found


def _plain(*arguments: Any) -> tuple[Tensor, Tensor]:
    return packed.forward(Inputs(*arguments[:5]), arguments[5])


def _like_outputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[3]), state.new_empty(state.shape)


_operator = register(
    "diagonal_linear_attention(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor state,"
    " Tensor? cu_seqlens) -> (Tensor, Tensor)",
    "diagonal_linear_attention_backward(Tensor grad_o, Tensor grad_state, Tensor q, Tensor k, Tensor v,"
    " Tensor log_decay, Tensor state, Tensor? cu_seqlens) -> Tensor[]",
    _forward,
    _backward,
    _plain,
    like_outputs=_like_outputs,
    n_inputs=5,
    n_tensors=6,
    n_outputs=2,
)
