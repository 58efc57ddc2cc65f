"""The causal convolution in Triton, for CUDA, by chunks of tokens and blocks of channels, all in parallel.

A kernel reads and writes each number in memory once; repeated reads come from the cache. Only the gradients
of the taps take extra memory: one sum per chunk of 64 tokens, which is 4 W / 64 bytes per number of x. With
silu, the backward pass first writes the gradients before silu, in fp32.
"""

import torch
from torch import Tensor

from unrolled.ops.conv import plain
from unrolled.ops.triton import TYPES, on, runs_on
from unrolled.ops.triton.check import TOKENS, Call, Example, random_tensors, trusted
from unrolled.ops.triton.launch import Slots, block, blocks, launch, with_strides

MOST_TAPS = 16  # the kernels are unrolled over the taps
CHUNK, CHANNELS = 64, 64  # tokens and channels of a program


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> bool:
    """Whether the kernels can run this: up to 16 taps, up to 32 bits, on CUDA or in the interpreter."""
    fits = x.dtype in TYPES and state.dtype == torch.float32 and weight.shape[1] <= MOST_TAPS
    return fits and runs_on(x.device)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, ...]:
    """Compute what `plain.forward` does."""
    call = _described("forward", x, weight, bias, silu)
    form = _forward if trusted(call, _forward, _example) else plain.forward
    return form(x, weight, bias, state, cu_seqlens, silu)


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
    """Compute what `plain.backward` does."""
    call = _described("backward", x, weight, bias, silu)
    form = _backward if trusted(call, _backward, _example) else plain.backward
    return list(form(grad_y, grad_state, x, weight, bias, state, cu_seqlens, silu))


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, ...]:
    from unrolled.ops.conv import triton_kernels as kernels

    (B, T, C), W = x.shape, weight.shape[1]
    slots, state = Slots.cut(B, T, cu_seqlens, CHUNK), state.contiguous()
    bias = None if bias is None else bias.contiguous()
    BC = block(C, CHANNELS)
    y, after = x.new_empty(x.shape), state.new_empty(state.shape)
    given, taps = with_strides(x), with_strides(weight)
    with on(x.device):
        grid, options = (slots.n, blocks(C, BC)), {"SILU": silu, "W": W, "C": CHUNK, "BC": BC}
        launch(kernels.outputs, grid, *given, *taps, bias, state, y, *slots[1:], C, **options)
        if W > 1:
            sizes = {"W": W, "ROWS": block(W - 1), "BC": BC}
            grid = len(state), blocks(C, BC)
            launch(kernels.states, grid, *given, state, after, T, slots.cu_seqlens, C, **sizes)
    return y, after


def _backward(
    grad_y: Tensor,
    grad_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, ...]:
    from unrolled.ops.conv import triton_kernels as kernels

    (B, T, C), W = x.shape, weight.shape[1]
    slots = Slots.cut(B, T, cu_seqlens, CHUNK)
    bias = None if bias is None else bias.contiguous()
    state, grad_state, BC = state.contiguous(), grad_state.contiguous(), block(C, CHANNELS)
    dx, d_state = x.new_empty(x.shape), state.new_empty(state.shape)
    d_taps = state.new_empty(slots.n, W, C)
    given, taps = with_strides(x), with_strides(weight)
    with on(x.device):
        grid = slots.n, blocks(C, BC)
        if silu:
            through, grad_y = with_strides(grad_y), state.new_empty(x.shape)
            before = (*given, *taps, bias, state, *through, grad_y)
            launch(kernels.gradients_before_silu, grid, *before, *slots[1:], C, W=W, C=CHUNK, BC=BC)
        grads = (*with_strides(grad_y), grad_state)
        tensors = (*given, *taps, state, *grads, dx, d_taps)
        launch(kernels.input_gradients, grid, *tensors, *slots[1:], C, W=W, C=CHUNK, BC=BC)
        if W > 1:
            sizes = {"W": W, "ROWS": block(W - 1), "BC": BC}
            grid = len(state), blocks(C, BC)
            launch(kernels.state_gradients, grid, *taps, *grads, d_state, T, slots.cu_seqlens, C, **sizes)
    d_bias = state.new_empty(0) if bias is None else grad_y.sum((0, 1), dtype=state.dtype).to(bias.dtype)
    return dx, d_taps.sum(0).T.to(weight.dtype), d_bias, d_state


def _described(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Call:
    others = weight.shape[1], bias is not None, silu
    return Call("the causal convolution", kind, x.device, x.dtype, (), False, others)


def _example(call: Call) -> Example:
    """Make the arguments of a small call, and its results in fp64."""
    (W, biased, flag), C = call.others, 20
    silu = bool(flag)
    random = random_tensors(call.device)
    x, weight, state = random(1, TOKENS, C, dtype=call.dtype), random(C, W), random(1, W - 1, C)
    bias = random(C) if biased else None
    inputs = x, weight, bias, state
    exact = x.double(), weight.double(), None if bias is None else bias.double(), state.double()
    if call.kind == "forward":
        y, after = plain.forward(*exact, None, silu)
        return Example((*inputs, None, silu), {"the output": y, "the state": after})
    grads = random(1, TOKENS, C, dtype=call.dtype), random(1, W - 1, C)
    found = plain.backward(grads[0].double(), grads[1].double(), *exact, None, silu)
    names = (f"the gradient of {name}" for name in ("x", "weight", "the bias", "the state"))
    return Example((*grads, *inputs, None, silu), dict(zip(names, found, strict=True)))
