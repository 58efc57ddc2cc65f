"""The selective scan in plain PyTorch: a parallel scan over some tokens at a time.

Packed sequences of similar lengths run together, padded on the right.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.masks import without_padding
from unrolled.ops.operators import gradients
from unrolled.ops.packing import length_buckets, put_tokens
from unrolled.ops.scan import linear_scan

CHUNK = 64
"""How many tokens have their states in memory at a time, if no gradients are needed."""


class Inputs(NamedTuple):
    """The inputs of the scan."""

    x: Tensor  # [B,T,C]
    dt: Tensor  # [B,T,C]
    a: Tensor  # [C,N]
    b: Tensor  # [B,T,N]
    c: Tensor  # [B,T,N]
    state: Tensor  # [B,C,N], in the accumulation dtype


def supports(inputs: Inputs) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `y [B,T,C]` and the state after the last token, of each sequence."""
    if cu_seqlens is None:
        return _scan(inputs)
    x, dt, a, b, c, state = inputs
    y, after = torch.zeros_like(x), torch.zeros_like(state)
    for rows, tokens, padding in length_buckets(cu_seqlens, x.shape[1]):
        x_part, dt_part, b_part, c_part = (without_padding(z[0, tokens], padding) for z in (x, dt, b, c))
        y_part, state_part = _scan(Inputs(x_part, dt_part, a, b_part, c_part, state[rows]))
        y, after = put_tokens(y, tokens, padding, y_part), after.index_copy(0, rows, state_part)
    return y, after


def step(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute the same for one token, T = 1."""
    x, dt, a, b, c = (z.to(inputs.state.dtype) for z in inputs[:5])
    state = (dt.mT * a).exp() * inputs.state + (dt * x).mT * b
    return (state @ c.mT).mT.to(inputs.x.dtype), state


def backward(grad_y: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute the gradients of the inputs."""
    return gradients(lambda *xs: forward(Inputs(*xs), cu_seqlens), inputs, (grad_y, grad_state))


def _scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, dt, a, b, c = (z.to(inputs.state.dtype) for z in inputs[:5])
    state, ys = inputs.state, [x[:, :0]]
    for first in range(0, x.shape[1], CHUNK):
        piece = slice(first, first + CHUNK)
        decays = (dt[:, piece].unsqueeze(-1) * a).exp()
        writes = (dt[:, piece] * x[:, piece]).unsqueeze(-1) * b[:, piece].unsqueeze(2)
        begun = torch.cat([decays[:, :1] * state.unsqueeze(1) + writes[:, :1], writes[:, 1:]], dim=1)
        states = linear_scan(decays, begun)
        ys.append((states @ c[:, piece].unsqueeze(-1)).squeeze(-1))
        state = states[:, -1].clone()  # a view would keep the states of all tokens
    return torch.cat(ys, dim=1).to(inputs.x.dtype), state
