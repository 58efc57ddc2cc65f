"""The delta rule in Triton, for CUDA.

The corrections N of a chunk are the values of gated linear attention, whose kernels do the rest. Forward:

1. `inverses`: inverts the triangular matrix of each chunk, all in parallel.
2. `corrections`: multiplies by the inverses, all in parallel.
3. `scan`: walks along the chunks with S in registers, by columns of S, and stores the states and N.
4. Linear attention's `outputs`, all in parallel.

Backward:

5. 1 to 3 again, for the states and N; linear attention's `query_gradients`.
6. Linear attention's `value_gradients` and `chunk_sums` over the queries: what the outputs add to the
   gradients of N and of the states. `scan_back` completes both, from the last chunk to the first.
7. Linear attention's `key_gradients`.
8. `correction_gradients` and `key_gradients`: the gradients through the triangular systems. Linear
   attention's `gate_gradients`.

Everything is fp32, except the inputs and their gradients. Memory besides the results, in numbers per token
and key head: R + M + 64 in the forward pass, 2 R + 3 M + 64 in the backward pass. For every 64 tokens, the
forward pass also keeps one state, and the backward pass two.
"""

from torch import Tensor

from unrolled.ops.delta import packed
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.linear.triton import supports
from unrolled.ops.triton import on
from unrolled.ops.triton.check import TOKENS, Call, Example, random_tensors, trusted

__all__ = ["backward", "forward", "supports"]


def forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """Compute what `packed.forward` does."""
    form = _forward if trusted(_described("forward", inputs), _forward, _example) else packed.forward
    return form(inputs, cu_seqlens)


def backward(grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute what `packed.backward` does."""
    form = _backward if trusted(_described("backward", inputs), _backward, _example) else packed.backward
    return list(form(grad_o, grad_state, inputs, cu_seqlens))


def _forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    from unrolled.ops.delta.triton_launch import Problem

    with on(inputs.q.device):
        problem = Problem(inputs, cu_seqlens)
        found = problem.corrections()
        states, after = problem.scan_corrections(found, found.u)
        o, _ = problem.with_values(found.u).outputs(problem.split(states), normalize=False)
        return o, after


def _backward(
    grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None
) -> tuple[Tensor, ...]:
    from unrolled.ops.delta.triton_launch import Problem
    from unrolled.ops.linear.triton_launch import OutputGradient

    with on(inputs.q.device):
        problem = Problem(inputs, cu_seqlens)
        found = problem.corrections()
        n = found.u.new_empty(found.u.shape)
        states, _ = problem.scan_corrections(found, n)
        grad, reader = OutputGradient(grad_o, grad_o.stride(), None), problem.with_values(n)
        dq, _, d_reads = reader.query_gradients(problem.split(states), grad)

        d_n = reader.value_gradients(None, grad, n)
        d_states, d_first = problem.scan_back(found, d_n, problem.query_sums(grad, None), grad_state)

        dk = reader.key_gradients(problem.split(d_states), grad, None, n.new_empty(inputs.k.shape))
        dv, d_beta = problem.correction_gradients(found, d_n, states, d_reads, inputs.beta)
        dk = problem.add_key_gradients(found, dk)
        d_log_decay = n.new_empty(0)
        if inputs.log_decay is not None:
            d_log_decay = reader.gate_gradients(inputs.log_decay, states, d_states, d_reads)
        return dq, dk, dv, d_beta, d_log_decay, d_first


def _described(kind: str, inputs: Inputs) -> Call:
    (*_, H, R), (*_, G, M), gated = inputs.q.shape, inputs.v.shape, inputs.log_decay is not None
    return Call("the delta rule", kind, inputs.q.device, inputs.q.dtype, (R, M), gated, (H // max(G, 1),))


def _example(call: Call) -> Example:
    """Make the arguments of a small call, and its results in fp64."""
    (R, M), (P,), T = call.widths, call.others, TOKENS
    random = random_tensors(call.device)
    k = random(1, T, 1, R)
    inputs = Inputs(
        random(1, T, P, R, dtype=call.dtype),
        (k / k.norm(dim=-1, keepdim=True)).to(call.dtype),
        random(1, T, 1, M, dtype=call.dtype),
        random(1, T, 1).sigmoid(),
        -random(1, T, 1).abs() / 20 if call.gated else None,
        random(1, 1, R, M),
    )
    exact = Inputs(*(None if x is None else x.double() for x in inputs))  # type: ignore[arg-type]
    if call.kind == "forward":
        o, after = packed.forward(exact, None)
        return Example((inputs, None), {"the output": o, "the state": after})
    grads = random(1, T, P, M, dtype=call.dtype), random(1, 1, R, M)
    found = packed.backward(grads[0].double(), grads[1].double(), exact, None)
    names = (f"the gradient of {name}" for name in ("q", "k", "v", "beta", "log_decay", "the state"))
    return Example((*grads, inputs, None), dict(zip(names, found, strict=True)))
