"""Window attention on a CPU: passes the tensors to the C++ kernels."""

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.dispatch import prefers
from unrolled.ops.native import TYPES, address, readable, sequences, struct, view
from unrolled.ops.observing import observed
from unrolled.ops.window.blocks import Inputs, Options, bounded


def supports(inputs: Inputs) -> bool:
    """Whether the kernels can run inputs of this type, on this device."""
    return inputs.q.device.type == "cpu" and inputs.q.dtype in TYPES and native.available()


def can_replace(inputs: Inputs) -> bool:
    """Whether the kernels can run these inputs in place of other operations."""
    return prefers("native") and not observed() and supports(inputs)


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Compute what `blocks.forward` does."""
    problem, _kept = _problem(inputs, options)
    B, T, H, _ = inputs.q.shape
    o, lse = inputs.v.new_empty(B, T, H, inputs.v.shape[3]), inputs.q.new_empty(B, T, H, dtype=torch.float32)
    native.call("window_forward", problem, struct("WindowOutputs")(o=address(o), lse=address(lse)))
    return o, lse


def backward(
    grad_o: Tensor, grad_lse: Tensor, inputs: Inputs, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `blocks.backward` does."""
    problem, _kept = _problem(inputs, options)
    q, k, v, padding = inputs
    grad_o, grad_lse, lse = readable(grad_o), grad_lse.contiguous(), lse.contiguous()
    every_key_is_read = padding is None and q.shape[1] >= k.shape[1]
    new = torch.empty if every_key_is_read else torch.zeros
    d_q = torch.empty(q.shape, dtype=q.dtype)
    d_k, d_v = (new(x.shape, dtype=x.dtype) for x in (k, v))
    gradients = struct("WindowGradients")(
        o=view(grad_o),
        d_lse=address(grad_lse),
        lse=address(lse),
        d_q=address(d_q),
        d_k=address(d_k),
        d_v=address(d_v),
    )
    native.call("window_backward", problem, gradients)
    return d_q, d_k, d_v


def _problem(inputs: Inputs, options: Options) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    q, k, v, padding = inputs
    cu_seqlens, window_size, scale = options
    (B, T), S = q.shape[:2], v.shape[1]
    N, cu_seqlens = sequences(cu_seqlens, B, T)
    q, k, v = readable(q), readable(k), readable(v)
    padding = None if padding is None else padding.contiguous()
    left, right = bounded(window_size, T, S)
    problem = struct("Window")(
        sequences=N,
        queries=T,
        keys=S,
        **native.sizes(q, k, v),
        left=min(left, S),
        right=min(right, T),
        scale=scale,
        offsets=address(cu_seqlens),
        padding=address(padding),
        q=view(q),
        k=view(k),
        v=view(v),
    )
    return problem, (cu_seqlens, padding, q, k, v)
