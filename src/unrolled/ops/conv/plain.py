"""The causal convolution in plain PyTorch: one product for each tap."""

import torch
from torch import Tensor

from unrolled.ops.operators import gradients
from unrolled.ops.packing import segment_ids


def supports(x: Tensor, weight: Tensor, state: Tensor) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(
    x: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `y [B,T,C]` and the state `[B,W-1,C]` after the last token, by differentiable operations."""
    T, W = x.shape[1], weight.shape[1]
    past = W - 1
    taps = weight.to(state.dtype).unbind(1)
    if cu_seqlens is None:
        inputs = torch.cat([state, x.to(state.dtype)], dim=1)
        y = sum((tap * inputs[:, i : i + T] for i, tap in enumerate(taps)), inputs.new_zeros(()))
        # A copy: a slice would keep all inputs in memory.
        return y.to(x.dtype), inputs[:, T:].clone(memory_format=torch.contiguous_format)
    # Lay every sequence behind the rows of its own state, all in one row.
    token = torch.arange(T, device=x.device) + (segment_ids(cu_seqlens, T) + 1) * past
    ends = cu_seqlens[1:].long() + torch.arange(1, len(cu_seqlens), device=x.device) * past
    starts = cu_seqlens[:-1].long() + torch.arange(len(cu_seqlens) - 1, device=x.device) * past
    within = torch.arange(past, device=x.device)
    inputs = state.new_zeros(T + len(state) * past, x.shape[2])
    inputs = inputs.index_copy(0, (starts.unsqueeze(1) + within).flatten(), state.flatten(0, 1))
    inputs = inputs.index_copy(0, token, x[0].to(state.dtype))
    y = sum((tap * inputs[token - past + i] for i, tap in enumerate(taps)), inputs.new_zeros(()))
    return y.to(x.dtype).unsqueeze(0), inputs[(ends - past).unsqueeze(1) + within]


def backward(
    grad_y: Tensor, grad_state: Tensor, x: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """Compute the gradients of `x`, `weight` and `state`."""

    def run(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return forward(x, weight, state, cu_seqlens)

    return gradients(run, (x, weight, state), (grad_y, grad_state))
