"""Linear attention in Triton, for CUDA, with all chunks in parallel.

Forward, causal:

1. `chunk_sums`: what each chunk adds to the state.
2. `scan`: turns these sums in place into the states before the chunks.
3. `outputs`: each chunk from its state and its own keys.

Only phase 2 walks along the sequence, with one multiply-add per element of the state. If one program per head
walked along the chunks, most of a GPU would be idle at B = 1, H = 8. There, 4096 tokens make 512 programs of
phase 1 and 512 of phase 3.

Backward:

4. `chunk_sums` and `scan`: the states again.
5. `query_gradients`, and the gradients of the divisors.
6. `chunk_sums` over the queries and `scan` from the end: the gradients of the states.
7. `key_gradients`, `value_gradients` and `gate_gradients`.

Bidirectional queries all read the final state, so its gradient is a sum over all of them.

Memory besides the results: the forward pass keeps one fp32 state per chunk, and the backward pass two. A
state per chunk takes R (M+1) / 16 bytes per token and key head, as much as k in fp32 where M = 64. The
backward pass also keeps 8 bytes per token and query head.

No call reads a value on the host, synchronises with the device, or allocates outside of PyTorch, except for
the check of a kernel at its first use (`ops.triton.check`). Triton is imported at the first call, not
with this module.
"""

import torch
from torch import Tensor

from unrolled.ops.linear import chunked, packed
from unrolled.ops.linear.chunked import Gradients, Inputs, Options, OutputGradients, Outputs, Token
from unrolled.ops.linear.triton_check import described, example
from unrolled.ops.triton import TYPES, WIDEST, on, runs_on
from unrolled.ops.triton.check import trusted


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels can run this: widths up to 256 of up to 32 bits, on CUDA or in the interpreter."""
    return q.dtype in TYPES and all(0 < x.shape[-1] <= WIDEST for x in (q, v)) and runs_on(q.device)


def forward(inputs: Inputs, options: Options) -> Outputs:
    """Compute what `packed.forward` does."""
    call = described("forward", inputs, options.causal, options.normalize)
    return _forward(inputs, options) if trusted(call, _forward, example) else packed.forward(inputs, options)


def _forward(inputs: Inputs, options: Options) -> Outputs:
    from unrolled.ops.linear.triton_launch import Problem

    causal = options.causal
    with on(inputs.q.device):
        problem = Problem(inputs, options)
        states, through = problem.key_sums()
        end = problem.scan(problem.keys, states, through, (inputs.kv, inputs.k_sum), keep=causal)
        o, den = problem.outputs(problem.split(states) if causal else end, options.normalize)
        return Outputs(o, *end, den)


def backward(grads: OutputGradients, inputs: Inputs, den: Tensor, options: Options) -> Gradients:
    """Compute what `packed.backward` does."""
    call = described("backward", inputs, options.causal, options.normalize)
    form = _backward if trusted(call, _backward, example) else packed.backward
    return form(grads, inputs, den, options)


def _backward(grads: OutputGradients, inputs: Inputs, den: Tensor, options: Options) -> Gradients:
    from unrolled.ops.linear.triton_launch import OutputGradient, Problem

    causal, gated = options.causal, inputs.log_decay is not None
    with on(inputs.q.device):
        # The states again, and the gradients of the queries.
        problem = Problem(inputs, options)
        states, through = problem.key_sums()
        end = problem.scan(problem.keys, states, through, (inputs.kv, inputs.k_sum), keep=causal or gated)
        grad = OutputGradient(grads.o, grads.o.stride(), den if options.normalize else None)
        read = problem.split(states) if causal else end
        dq, d_den, d_reads = problem.query_gradients(read, grad)

        # The gradients of the states.
        d_states = problem.query_sums(grad, d_den)
        d_end = grads.kv, grads.k_sum
        if not causal:
            d_end = problem.scan(problem.queries, d_states, None, d_end, keep=False)
        if not causal and gated:
            d_states = torch.zeros_like(states)  # no query reads the states before the last
        if causal or gated:
            d_first = problem.scan(problem.keys, d_states, through, d_end, from_end=True)
            d_after = problem.split(d_states)
        else:  # one state, from the first key to the last
            d_first = d_after = d_end

        # The gradients of the keys, the values and the gates.
        dk = problem.key_gradients(d_after, grad, d_den, inputs.k.new_empty(inputs.k.shape))
        dv = problem.value_gradients(d_after, grad, inputs.v)
        d_log_decay = grads.kv.new_empty(0)
        if inputs.log_decay is not None:
            d_log_decay = problem.gate_gradients(inputs.log_decay, states, d_states, d_reads)
        return Gradients(dq, dk, dv, d_log_decay, *d_first)


def step(token: Token, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run one token of the recurrence: `o [B,H,M]` and a new state."""
    call = described("step", token, True, normalize)
    return _step(token, normalize) if trusted(call, _step, example) else chunked.step(token, normalize)


def _step(token: Token, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    from unrolled.ops.linear import triton_launch

    with on(token.q.device):
        return triton_launch.step(token, normalize)
