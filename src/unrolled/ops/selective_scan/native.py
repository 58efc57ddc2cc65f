"""The selective scan on a CPU: passes the tensors to the C++ kernels."""

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.native import TYPES, address, readable, sequences, struct, view_without_heads
from unrolled.ops.selective_scan.plain import Inputs


def supports(inputs: Inputs) -> bool:
    """Whether the kernels can run inputs of these types, on this device."""
    x, state = inputs.x, inputs.state
    return x.is_cpu and x.dtype in TYPES and state.dtype == torch.float32 and native.available()


def forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what `plain.forward` does."""
    return _called("selective_scan_forward", inputs, cu_seqlens)


def step(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute what `plain.step` does."""
    return _called("selective_scan_step", inputs, None)


def backward(grad_y: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute what `plain.backward` does."""
    problem, _kept = _described(inputs, cu_seqlens)
    grad_y, grad_state = readable(grad_y), grad_state.contiguous()
    d_x, d_b, d_c, d_state = (z.new_empty(z.shape) for z in (inputs.x, inputs.b, inputs.c, inputs.state))
    d_dt, d_a = (native.floats(*z.shape) for z in (inputs.dt, inputs.a))
    gradients = struct("SelectiveScanGradients")(
        y=view_without_heads(grad_y),
        state=address(grad_state),
        d_x=address(d_x),
        d_b=address(d_b),
        d_c=address(d_c),
        d_dt=address(d_dt),
        d_a=address(d_a),
        d_state=address(d_state),
    )
    native.call("selective_scan_backward", problem, gradients)
    return [d_x, d_dt.to(inputs.dt.dtype), d_a.to(inputs.a.dtype), d_b, d_c, d_state]


def _called(kernel: str, inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    problem, _kept = _described(inputs, cu_seqlens)
    y, state = inputs.x.new_empty(inputs.x.shape), inputs.state.new_empty(inputs.state.shape)
    outputs = struct("SelectiveScanOutputs")(y=address(y), state=address(state))
    native.call(kernel, problem, outputs)
    return y, state


def _described(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    B, T, C = inputs.x.shape
    n, cu_seqlens = sequences(cu_seqlens, B, T)
    x, b, c = map(readable, (inputs.x, inputs.b, inputs.c))
    dt, a, state = inputs.dt.float(), inputs.a.float().contiguous(), inputs.state.contiguous()
    problem = struct("SelectiveScan")(
        sequences=n,
        tokens=T,
        channels=C,
        states=a.shape[1],
        type=native.common_type(x, b, c),
        threads=torch.get_num_threads(),
        offsets=address(cu_seqlens),
        x=view_without_heads(x),
        b=view_without_heads(b),
        c=view_without_heads(c),
        dt=(address(dt), *dt.stride()),
        a=address(a),
        state=address(state),
    )
    return problem, (cu_seqlens, x, b, c, dt, a, state)
