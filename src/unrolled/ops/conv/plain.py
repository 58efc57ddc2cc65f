"""The causal convolution in plain PyTorch: one product for each tap."""

import torch
from torch import Tensor
from torch.nn import functional

from unrolled.ops.operators import gradients
from unrolled.ops.packing import segment_ids


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `y [B,T,C]` and the state `[B,W-1,C]` after the last token, by differentiable operations."""
    T, W = x.shape[1], weight.shape[1]
    past = W - 1
    taps = weight.to(state.dtype).unbind(1)
    start = state.new_zeros(()) if bias is None else bias.to(state.dtype)

    def end(z: Tensor) -> Tensor:
        return (functional.silu(z) if silu else z).to(x.dtype)

    if cu_seqlens is None:
        inputs = torch.cat([state, x.to(state.dtype)], dim=1)
        z = sum((tap * inputs[:, i : i + T] for i, tap in enumerate(taps)), start)
        # A copy: a slice would keep all inputs in memory.
        return end(z), inputs[:, T:].clone(memory_format=torch.contiguous_format)
    # Lay every sequence behind the rows of its own state, all in one row.
    token = torch.arange(T, device=x.device) + (segment_ids(cu_seqlens, T) + 1) * past
    ends = cu_seqlens[1:].long() + torch.arange(1, len(cu_seqlens), device=x.device) * past
    starts = cu_seqlens[:-1].long() + torch.arange(len(cu_seqlens) - 1, device=x.device) * past
    within = torch.arange(past, device=x.device)
    inputs = state.new_zeros(T + len(state) * past, x.shape[2])
    inputs = inputs.index_copy(0, (starts.unsqueeze(1) + within).flatten(), state.flatten(0, 1))
    inputs = inputs.index_copy(0, token, x[0].to(state.dtype))
    z = sum((tap * inputs[token - past + i] for i, tap in enumerate(taps)), start)
    return end(z).unsqueeze(0), inputs[(ends - past).unsqueeze(1) + within]


def backward(
    grad_y: Tensor,
    grad_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """Compute the gradients of `x`, `weight`, `bias` and `state`; that of an absent bias is empty."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        return forward(x, weight, bias, state, cu_seqlens, silu)

    return gradients(run, (x, weight, bias, state), (grad_y, grad_state))
