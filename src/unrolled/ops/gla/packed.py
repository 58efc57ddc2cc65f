"""Linear attention with a gate for every feature in plain PyTorch, for packed sequences too.

Packed sequences of similar lengths run together, padded on the right.
"""

from typing import NamedTuple

from torch import Tensor

from unrolled.ops.gla import chunked
from unrolled.ops.masks import without_padding
from unrolled.ops.packing import length_buckets, put_tokens
from unrolled.ops.recurrence import run_packed


class Inputs(NamedTuple):
    """The inputs, with as many queries as keys."""

    q: Tensor  # [B,T,H,R]
    k: Tensor  # [B,T,G,R]
    v: Tensor  # [B,T,G,M], in the dtype of q and k
    log_decay: Tensor  # [B,T,G,R]
    state: Tensor  # [B,G,R,M], one row for each sequence, in the accumulation dtype


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,H,M]` and the states after the last keys, by differentiable operations."""
    return run_packed(lambda part: chunked.forward(*part), inputs, cu_seqlens)


def backward(grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute the gradients of the inputs."""
    if cu_seqlens is None:
        return chunked.backward(grad_o, grad_state, *inputs)
    *tokenwise, state = inputs
    found = [x.new_zeros(x.shape) for x in tokenwise]
    d_state = grad_state.new_zeros(grad_state.shape)
    for rows, tokens, padding in length_buckets(cu_seqlens, inputs.q.shape[1]):
        grad, q, k, v, log_decay = (without_padding(x[0, tokens], padding) for x in (grad_o, *tokenwise))
        *parts, d_part = chunked.backward(grad, grad_state[rows], q, k, v, log_decay, state[rows])
        found = [put_tokens(x, tokens, padding, part) for x, part in zip(found, parts, strict=True)]
        d_state = d_state.index_copy(0, rows, d_part)
    return [*found, d_state]
