"""Heads scaled to a length, the operation behind unit keys and the RMS norm of heads.

On a CPU, a C++ kernel makes one pass over the memory, with the activation before and the gate after it.
Compilers, exporters and transforms see plain operations, which they can fuse and differentiate.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from unrolled.ops import native
from unrolled.ops.dispatch import runs_native
from unrolled.ops.native import TYPES, View, address, enum, readable, struct, view
from unrolled.ops.operators import differentiable_gradients
from unrolled.ops.precision import accumulation_dtype

GateFunction = Literal["silu", "sigmoid"]


class Options(NamedTuple):
    """What is not a tensor; see `scale_heads`."""

    length: float
    eps: float
    activation: bool
    gate_function: GateFunction
    gate_first: bool


def scale_heads(
    x: Tensor,
    length: float,
    eps: float,
    *,
    activation: bool = False,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    gate_function: GateFunction = "silu",
    gate_first: bool = False,
) -> Tensor:
    """Scale the vectors of the last axis to a length, then multiply by a weight and a gate.

        u = f(x),    n = length * u / sqrt(|u|^2 + eps),    y = n * weight * g(gate)

    This function checks nothing.

    Args:
        x: `[...,H,M]`.
        length: the length of n, but for eps.
        eps: added to the squared length, so that zeros stay zeros, with finite gradients.
        activation: whether f is silu; otherwise, f is the identity.
        weight: `[H,M]`, or None.
        gate: like `x`, in any floating type, or None.
        gate_function: g, silu or the logistic function.
        gate_first: multiply by the gate before the norm: u = f(x) * g(gate), y = n * weight.

    Returns:
        A tensor of the shape of `x`, in fp32, or in fp64 if an argument is fp64.
    """
    options = Options(length, eps, activation, gate_function, gate_first and gate is not None)
    if x.dim() in (3, 4) and runs_native(x, weight, gate):
        y: Tensor = _Scaled.apply(x, weight, gate, options)  # type: ignore[no-untyped-call]
        return y
    return _plain(x, weight, gate, options)


def _plain(x: Tensor, weight: Tensor | None, gate: Tensor | None, options: Options) -> Tensor:
    dtype = accumulation_dtype(*(y.dtype for y in (x, weight, gate) if y is not None))
    u = x.to(dtype)
    if options.activation:
        u = silu(u)
    factor = None
    if gate is not None:
        factor = silu(gate.to(dtype)) if options.gate_function == "silu" else gate.to(dtype).sigmoid()
    if factor is not None and options.gate_first:
        u, factor = u * factor, None
    y = u * ((u.square().sum(-1, keepdim=True) + options.eps).rsqrt() * options.length)
    if weight is not None:
        y = y * weight.to(dtype)
    return y if factor is None else y * factor


class _Scaled(torch.autograd.Function):
    """The operation by the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, options: Options) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.options = options
        problem, _kept = _problem(x, weight, gate, options)
        y = x.new_empty(x.shape, dtype=torch.float32)
        native.call("head_scale", problem, struct("HeadScaleOutputs")(y=address(y)))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, options = ctx.saved_tensors, ctx.options
        if torch.is_grad_enabled():  # create_graph=True
            found = differentiable_gradients(
                lambda x, weight, gate: (_plain(x, weight, gate, options),), inputs, grads
            )
        else:
            x, weight, gate = inputs
            found = _gradients(grads[0], x, weight, gate, options)
        return *found, None


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, options: Options
) -> list[Tensor | None]:
    """Compute the gradients of `x`, `weight` and `gate`."""
    problem, _kept = _problem(x, weight, gate, options)
    grad, d_x = grad.resolve_neg().contiguous(), x.new_empty(x.shape)
    d_weight = None if weight is None else native.floats(*weight.shape)
    d_gate = None if gate is None else gate.new_empty(gate.shape)
    gradients = struct("HeadScaleGradients")(
        y=address(grad), d_x=address(d_x), d_gate=address(d_gate), d_weight=address(d_weight)
    )
    native.call("head_scale_backward", problem, gradients)
    return [d_x, None if weight is None or d_weight is None else d_weight.to(weight.dtype), d_gate]


def _problem(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, options: Options
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    x, weight = _of_four_axes(x), None if weight is None else weight.resolve_neg().float().contiguous()
    gate = None if gate is None else _of_four_axes(gate)
    rows, tokens, heads, width = x.shape
    no_gate: View = (0, 0, 0, 0)
    problem = struct("HeadScale")(
        rows=rows,
        tokens=tokens,
        heads=heads,
        width=width,
        type=TYPES[x.dtype],
        gate_type=TYPES[torch.float32 if gate is None else gate.dtype],
        activation=options.activation,
        gate_function=enum("Function")[options.gate_function.upper()],
        gate_first=options.gate_first,
        threads=torch.get_num_threads(),
        length=options.length,
        eps=options.eps,
        x=view(x),
        gate=no_gate if gate is None else view(gate),
        weight=address(weight),
    )
    return problem, (x, weight, gate)


def _of_four_axes(x: Tensor) -> Tensor:
    x = readable(x.resolve_neg())
    return x if x.dim() == 4 else x.unsqueeze(0)
