"""The rule of a diagonal plus low rank in plain PyTorch.

Packed sequences of similar lengths run together, padded on the right.
"""

import torch
from torch import Tensor

from unrolled.ops.dplr import chunked
from unrolled.ops.dplr.chunked import Inputs
from unrolled.ops.masks import without_padding
from unrolled.ops.operators import gradients
from unrolled.ops.packing import length_buckets, put_tokens


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what `chunked.forward` does for each sequence; the state has one row per sequence."""
    if cu_seqlens is None:
        return chunked.forward(inputs)
    *tokenwise, state = inputs
    o, after = torch.zeros_like(inputs.v), torch.zeros_like(state)
    for rows, tokens, padding in length_buckets(cu_seqlens, inputs.q.shape[1]):
        part = (without_padding(x[0, tokens], padding) for x in tokenwise)
        o_part, state_part = chunked.forward(Inputs._make((*part, state[rows])))
        o, after = put_tokens(o, tokens, padding, o_part), after.index_copy(0, rows, state_part)
    return o, after


def backward(grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute the gradients of the inputs."""
    return gradients(lambda *xs: forward(Inputs(*xs), cu_seqlens), inputs, (grad_o, grad_state))
