"""The delta rule on a CPU, by the C++ kernels of linear attention with rates.

With a gate for every feature, the kernels of gated linear attention run it.
"""

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.gla import native as gla
from unrolled.ops.gla.packed import Inputs as GatedInputs
from unrolled.ops.linear import chunked as linear
from unrolled.ops.linear.native import described, supports
from unrolled.ops.linear.native import step as linear_step
from unrolled.ops.native import address, readable, struct, view

__all__ = ["backward", "forward", "step", "supports"]


def forward(
    inputs: Inputs, cu_seqlens: Tensor | None, unit_epsilon: float = 0.0, query_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute what `packed.forward` does.

    With a `unit_epsilon` above 0, queries and keys x are first divided by sqrt(|x|^2 + unit_epsilon), and the
    queries are multiplied by `query_scale`, both in fp32. Neither is possible with a gate for every feature.
    """
    if inputs.by_feature:
        return gla.forward(_gated(inputs), cu_seqlens, inputs.beta)
    problem, _kept = _described(inputs, cu_seqlens, unit_epsilon, query_scale)
    o = inputs.v.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])
    state = inputs.state.new_empty(inputs.state.shape)  # contiguous, whatever the strides of the first state
    outputs = struct("LinearOutputs")(o=address(o), kv=address(state), k_sum=0, divisor=0)
    native.call("linear_forward", problem, outputs)
    return o, state


def backward(grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute the gradients of the inputs; that of absent gates is empty."""
    if inputs.by_feature:
        found = gla.backward(grad_o, grad_state, _gated(inputs), cu_seqlens, inputs.beta)
        d_q, d_k, d_v, d_log_decay, d_state, d_rates = found
        return [d_q, d_k, d_v, d_rates.to(inputs.beta.dtype), d_log_decay, d_state]
    problem, _kept = _described(inputs, cu_seqlens)
    (q, k, v, beta, log_decay, state), gates = inputs, inputs.log_decay
    grad_o, grad_state = readable(grad_o), grad_state.contiguous()
    d_q, d_k, d_v, d_state = (x.new_empty(x.shape) for x in (q, k, v, state))
    d_rates, residuals = native.floats(*beta.shape), native.floats(*v.shape)
    d_gates = torch.empty(0 if gates is None else gates.shape, dtype=torch.double, device="cpu")
    d_log_from_start = native.floats(*([0] if gates is None else q.shape[:3]))
    states = native.floats(native.linear_saved_floats(problem))
    gradients = struct("LinearGradients")(
        o=view(grad_o),
        kv=address(grad_state),
        k_sum=0,
        divisor=0,
        d_q=address(d_q),
        d_k=address(d_k),
        d_v=address(d_v),
        d_log_decay=address(d_gates),
        d_rates=address(d_rates),
        d_kv=address(d_state),
        d_k_sum=0,
        d_divisor=0,
        d_log_from_start=address(d_log_from_start),
        states=address(states),
        residuals=address(residuals),
    )
    native.call("linear_backward", problem, gradients)
    d_log_decay = d_gates if log_decay is None else d_gates.to(log_decay.dtype)
    return [d_q, d_k, d_v, d_rates.to(beta.dtype), d_log_decay, d_state]


def step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each."""
    token = linear.Token(q, k, v, state, state.new_empty(0), log_decay)
    o, state, _ = linear_step(token, normalize=False, rates=beta)
    return o, state


def _gated(inputs: Inputs) -> GatedInputs:
    q, k, v, _, log_decay, state = inputs
    assert log_decay is not None
    return GatedInputs(q, k, v, log_decay, state)


def _described(
    inputs: Inputs, cu_seqlens: Tensor | None, unit_epsilon: float = 0.0, query_scale: float = 1.0
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    q, k, v, beta, log_decay, state = inputs
    options = linear.Options(cu_seqlens, causal=True, normalize=False)
    problem = linear.Inputs(q, k, v, log_decay, state, None)
    return described(problem, options, beta, unit_epsilon, query_scale)
