"""Linear attention with a gate for every feature on a CPU: passes the tensors to the C++ kernels."""

from torch import Tensor

from unrolled.ops import native
from unrolled.ops.gla.packed import Inputs
from unrolled.ops.linear.chunked import Token
from unrolled.ops.linear.native import step as linear_step
from unrolled.ops.linear.native import supports
from unrolled.ops.native import address, readable, sequences, struct, view

__all__ = ["backward", "forward", "step", "supports"]


def forward(inputs: Inputs, cu_seqlens: Tensor | None, rates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute what `packed.forward` does; with `rates [B,T,G]`, the delta rule with these gates."""
    problem, _kept = _described(inputs, cu_seqlens, rates)
    o = inputs.v.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])
    state = inputs.state.new_empty(inputs.state.shape)
    native.call("gla_forward", problem, struct("GlaOutputs")(o=address(o), state=address(state)))
    return o, state


def backward(
    grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None, rates: Tensor | None = None
) -> list[Tensor]:
    """Compute what `packed.backward` does; with `rates`, their gradient comes last."""
    problem, _kept = _described(inputs, cu_seqlens, rates)
    grad_o, grad_state = readable(grad_o), grad_state.contiguous()
    d_q, d_k, d_v, d_state = (x.new_empty(x.shape) for x in (*inputs[:3], inputs.state))
    d_log_decay = native.floats(*inputs.log_decay.shape)
    d_rates = residuals = None
    if rates is not None:
        d_rates, residuals = (native.floats(*x.shape) for x in (rates, inputs.v))
    gradients = struct("GlaGradients")(
        o=view(grad_o),
        state=address(grad_state),
        d_q=address(d_q),
        d_k=address(d_k),
        d_v=address(d_v),
        d_log_decay=address(d_log_decay),
        d_state=address(d_state),
        d_rates=address(d_rates),
        residuals=address(residuals),
    )
    native.call("gla_backward", problem, gradients)
    found = [d_q, d_k, d_v, d_log_decay.to(inputs.log_decay.dtype), d_state]
    return found if d_rates is None else [*found, d_rates]


def step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each."""
    o, state, _ = linear_step(Token(q, k, v, state, state.new_empty(0), log_decay), normalize=False)
    return o, state


def _described(
    inputs: Inputs, cu_seqlens: Tensor | None, rates: Tensor | None
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    B, T = inputs.q.shape[:2]
    N, cu_seqlens = sequences(cu_seqlens, B, T)
    q, k, v, log_decay = map(readable, (*inputs[:3], inputs.log_decay.float()))
    rates, state = None if rates is None else rates.float().contiguous(), inputs.state.contiguous()
    problem = struct("Gla")(
        sequences=N,
        queries=T,
        keys=T,
        **native.sizes(q, k, v),
        offsets=address(cu_seqlens),
        q=view(q),
        k=view(k),
        v=view(v),
        log_decay=view(log_decay),
        rates=address(rates),
        state=address(state),
    )
    return problem, (cu_seqlens, q, k, v, log_decay, rates, state)
