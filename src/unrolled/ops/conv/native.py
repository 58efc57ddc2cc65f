"""The causal convolution on a CPU: passes the tensors to the C++ kernels."""

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.native import TYPES, address, readable, sequences, struct, view_without_heads


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> bool:
    """Whether the kernels can run inputs of these types, on this device.

    The dtype of the state shows that neither inputs nor taps are fp64.
    """
    return x.is_cpu and x.dtype in TYPES and state.dtype == torch.float32 and native.available()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Compute what `plain.forward` does."""
    problem, _kept = _problem(x, weight, bias, state, cu_seqlens, silu)
    y, after = x.new_empty(x.shape), state.new_empty(state.shape)
    native.call("conv_forward", problem, struct("ConvOutputs")(y=address(y), state=address(after)))
    return y, after


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
    problem, _kept = _problem(x, weight, bias, state, cu_seqlens, silu)
    grad_y, grad_state = readable(grad_y), grad_state.contiguous()
    d_x, d_state = x.new_empty(x.shape), state.new_empty(state.shape)
    d_taps = native.floats(*weight.shape[::-1])
    d_bias = native.floats(0 if bias is None else len(bias))
    gradients = struct("ConvGradients")(
        y=view_without_heads(grad_y),
        state=address(grad_state),
        d_x=address(d_x),
        d_weight=address(d_taps),
        d_bias=address(None if bias is None else d_bias),
        d_state=address(d_state),
    )
    native.call("conv_backward", problem, gradients)
    d_weight = d_taps.flip(0).T.to(weight.dtype).contiguous()
    return [d_x, d_weight, d_bias if bias is None else d_bias.to(bias.dtype), d_state]


def _problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    B, T, C = x.shape
    N, cu_seqlens = sequences(cu_seqlens, B, T)
    x, state, taps = readable(x), state.contiguous(), weight.float().T.flip(0).contiguous()
    bias = None if bias is None else bias.float().contiguous()
    problem = struct("Conv")(
        sequences=N,
        tokens=T,
        channels=C,
        taps=weight.shape[1],
        type=TYPES[x.dtype],
        activation=silu,
        threads=torch.get_num_threads(),
        offsets=address(cu_seqlens),
        x=view_without_heads(x),
        weight=address(taps),
        bias=address(bias),
        state=address(state),
    )
    return problem, (cu_seqlens, x, state, taps, bias)
