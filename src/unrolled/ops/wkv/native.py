"""The averages of RWKV-4 on a CPU: passes the tensors to the C++ kernels."""

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.native import TYPES, address, readable, sequences, struct, view_without_heads
from unrolled.ops.wkv.plain import Inputs


def supports(inputs: Inputs) -> bool:
    """Whether the kernels can run inputs of these types, on this device."""
    k, state = inputs.k, inputs.state
    return k.is_cpu and k.dtype in TYPES and state.dtype == torch.float32 and native.available()


def forward(inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what `plain.forward` does."""
    problem, _kept = _described(inputs, padding, cu_seqlens)
    o, state = inputs.v.new_empty(inputs.v.shape), inputs.state.new_empty(inputs.state.shape)
    native.call("wkv_forward", problem, struct("WkvOutputs")(o=address(o), state=address(state)))
    return o, state


def backward(
    grad_o: Tensor, grad_state: Tensor, inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """Compute what `plain.backward` does."""
    problem, _kept = _described(inputs, padding, cu_seqlens)
    grad_o, grad_state = readable(grad_o), grad_state.contiguous()
    d_k, d_v, d_state = (x.new_empty(x.shape) for x in (inputs.k, inputs.v, inputs.state))
    d_log_decay, d_bonus = (native.floats(*x.shape) for x in (inputs.log_decay, inputs.bonus))
    gradients = struct("WkvGradients")(
        o=view_without_heads(grad_o),
        state=address(grad_state),
        d_k=address(d_k),
        d_v=address(d_v),
        d_log_decay=address(d_log_decay),
        d_bonus=address(d_bonus),
        d_state=address(d_state),
    )
    native.call("wkv_backward", problem, gradients)
    return [d_k, d_v, d_log_decay.to(inputs.log_decay.dtype), d_bonus.to(inputs.bonus.dtype), d_state]


def _described(
    inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    B, T, C = inputs.k.shape
    n, cu_seqlens = sequences(cu_seqlens, B, T)
    k, v = readable(inputs.k), readable(inputs.v)
    log_decay, bonus = (x.float().contiguous() for x in (inputs.log_decay, inputs.bonus))
    state, padding = inputs.state.contiguous(), None if padding is None else padding.contiguous()
    problem = struct("Wkv")(
        sequences=n,
        tokens=T,
        channels=C,
        type=native.common_type(k, v),
        threads=torch.get_num_threads(),
        offsets=address(cu_seqlens),
        padding=address(padding),
        k=view_without_heads(k),
        v=view_without_heads(v),
        log_decay=address(log_decay),
        bonus=address(bonus),
        state=address(state),
    )
    return problem, (cu_seqlens, padding, k, v, log_decay, bonus, state)
