"""The rule of a diagonal plus low rank on a CPU: passes the tensors to the C++ kernels."""

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.dplr.chunked import Inputs
from unrolled.ops.linear.native import supports
from unrolled.ops.native import address, readable, sequences, struct, view

__all__ = ["backward", "forward", "step", "supports"]


def forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what `packed.forward` does."""
    problem, _kept = _described(inputs, cu_seqlens)
    o, state = inputs.v.new_empty(inputs.v.shape), inputs.state.new_empty(inputs.state.shape)
    native.call("dplr_forward", problem, struct("GlaOutputs")(o=address(o), state=address(state)))
    return o, state


def backward(grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute what `packed.backward` does."""
    problem, _kept = _described(inputs, cu_seqlens)
    grad_o, grad_state = readable(grad_o), grad_state.contiguous()
    d_q, d_k, d_v, d_a, d_b = (x.new_empty(x.shape) for x in inputs[:5])
    d_log_decay, reads = (native.floats(*x.shape) for x in (inputs.log_decay, inputs.v))
    d_state = inputs.state.new_empty(inputs.state.shape)
    gradients = struct("DplrGradients")(
        o=view(grad_o),
        state=address(grad_state),
        d_q=address(d_q),
        d_k=address(d_k),
        d_v=address(d_v),
        d_a=address(d_a),
        d_b=address(d_b),
        d_log_decay=address(d_log_decay),
        d_state=address(d_state),
        reads=address(reads),
    )
    native.call("dplr_backward", problem, gradients)
    return [d_q, d_k, d_v, d_a, d_b, d_log_decay.to(inputs.log_decay.dtype), d_state]


def step(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each, as a sequence of one token."""
    *token, state = inputs
    o, after = forward(Inputs._make((*(x.unsqueeze(1) for x in token), state)), None)
    return o.squeeze(1), after


def _described(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    (B, T, H, D), M = inputs.q.shape, inputs.v.shape[3]
    N, cu_seqlens = sequences(cu_seqlens, B, T)
    q, k, v, a, b, log_decay = map(readable, (*inputs[:5], inputs.log_decay.float()))
    state = inputs.state.contiguous()
    problem = struct("Dplr")(
        sequences=N,
        tokens=T,
        heads=H,
        features=D,
        values=M,
        type=native.common_type(q, k, v, a, b),
        threads=torch.get_num_threads(),
        offsets=address(cu_seqlens),
        q=view(q),
        k=view(k),
        v=view(v),
        a=view(a),
        b=view(b),
        log_decay=view(log_decay),
        state=address(state),
    )
    return problem, (cu_seqlens, q, k, v, a, b, log_decay, state)
