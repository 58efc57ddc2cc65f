"""The averages of RWKV-4 in Triton, for CUDA: a program takes a block of channels along a whole sequence.

The forward pass reads and writes each number in memory once. Backward:

1. The same scan, which keeps the sums before each token, and the exponents of its weights: four fp32 numbers
   per token and channel. All other memory depends on the number of sequences, not on their length.
2. The gradients, from the last token to the first. Each sequence computes its part of those of d and u.
"""

from typing import Any

import torch
from torch import Tensor

from unrolled.ops.triton import TYPES, on, runs_on
from unrolled.ops.triton.check import TOKENS, Call, Example, random_tensors, trusted
from unrolled.ops.triton.launch import block, blocks, launch, with_strides
from unrolled.ops.wkv import plain
from unrolled.ops.wkv.plain import Inputs

CHANNELS = 64  # of a program, which is one warp: a thread that loads ahead must load 32 bits, two of 16
STAGES = 8  # of loads that run ahead, since a token takes a fraction of the time of a load


def supports(inputs: Inputs) -> bool:
    """Whether the kernels can run inputs of these types: up to 32 bits, on CUDA or in the interpreter."""
    k, state = inputs.k, inputs.state
    return k.dtype in TYPES and state.dtype == torch.float32 and runs_on(k.device)


def forward(inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what `plain.forward` does."""
    form = _forward if trusted(_described("forward", inputs, padding), _forward, _example) else plain.forward
    return form(inputs, padding, cu_seqlens)


def backward(
    grad_o: Tensor, grad_state: Tensor, inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """Compute what `plain.backward` does."""
    trust = trusted(_described("backward", inputs, padding), _backward, _example)
    form = _backward if trust else plain.backward
    return list(form(grad_o, grad_state, inputs, padding, cu_seqlens))


def _forward(inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    o, after = inputs.v.new_empty(inputs.v.shape), inputs.state.new_empty(inputs.state.shape)
    _scan(inputs, padding, cu_seqlens, o, after, None, None)
    return o, after


def _backward(
    grad_o: Tensor, grad_state: Tensor, inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, ...]:
    from unrolled.ops.wkv import triton_kernels as kernels

    k, v, log_decay, bonus, state = inputs
    (B, T, C), N = k.shape, len(state)
    kept, scales = state.new_empty(B, T, 4, C), state.new_empty(N, C)
    _scan(inputs, padding, cu_seqlens, None, None, kept, scales)
    dk, dv, d_state = (x.new_empty(x.shape) for x in (k, v, state))
    d_log_decay, d_bonus = state.new_empty(N, C), state.new_empty(N, C)
    given = (*with_strides(v), *with_strides(grad_o), *map(_contiguous, (grad_state, padding)), kept, scales)
    _launch(kernels.scan_back, (*given, dk, dv, d_log_decay, d_bonus, d_state), inputs, cu_seqlens)
    return dk, dv, d_log_decay.sum(0).to(log_decay.dtype), d_bonus.sum(0).to(bonus.dtype), d_state


def _scan(inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None, *results: Tensor | None) -> None:
    """Write `o` and `after`, or `kept` and `scales`; the other two are None."""
    from unrolled.ops.wkv import triton_kernels as kernels

    k, v, *others = inputs
    given = (*with_strides(k), *with_strides(v), *map(_contiguous, (*others, padding)))
    _launch(kernels.scan, (*given, *results), inputs, cu_seqlens)


def _launch(kernel: Any, tensors: tuple[object, ...], inputs: Inputs, cu_seqlens: Tensor | None) -> None:
    (_, T, C), N = inputs.k.shape, len(inputs.state)
    BC = block(C, CHANNELS)
    sizes = {"BC": BC, "STAGES": STAGES, "num_warps": 1}
    with on(inputs.k.device):
        launch(kernel, (N, blocks(C, BC)), *tensors, T, _contiguous(cu_seqlens), C, **sizes)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _described(kind: str, inputs: Inputs, padding: Tensor | None) -> Call:
    return Call("wkv", kind, inputs.k.device, inputs.k.dtype, (), False, (padding is not None,))


def _example(call: Call) -> Example:
    """Make the arguments of a small call, and its results in fp64."""
    C, random, (padded,) = 20, random_tensors(call.device), call.others
    k, v = (random(1, TOKENS, C, dtype=call.dtype) for _ in range(2))
    state = random(1, 3, C)
    state[:, 1] = state[:, 1].exp()
    inputs = Inputs(k, v, -random(C).abs(), random(C), state)
    padding = random(1, TOKENS) < 0 if padded else None
    exact = Inputs(*(x.double() for x in inputs))
    if call.kind == "forward":
        o, after = plain.forward(exact, padding, None)
        return Example((inputs, padding, None), {"the output": o, "the state": after})
    grads = random(1, TOKENS, C, dtype=call.dtype), random(1, 3, C)
    found = plain.backward(grads[0].double(), grads[1].double(), exact, padding, None)
    names = (f"the gradient of {name}" for name in ("k", "v", "log_decay", "bonus", "the state"))
    return Example((*grads, inputs, padding, None), dict(zip(names, found, strict=True)))
