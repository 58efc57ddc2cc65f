"""Linear attention with a gate for every feature in Triton, for CUDA, with all chunks in parallel.

Forward:

1. `weights`: the weights of the pairs within each chunk of 64 tokens, by the cuts of `chunked.py`.
2. `chunk_sums`: what each chunk adds to the state. `scan` turns these sums into the states before the chunks.
3. `outputs`: each chunk from its state and its own values.

Backward:

4. `weights`, `chunk_sums` and `scan` again. Then `chunk_sums` over the queries and `scan` from the end
   compute the gradients of the states.
5. `value_gradients`, then `weight_gradients`.
6. `feature_gradients`, of queries, keys and gates.

For each of the 6 cuts of a chunk, a product gives all 64 x 64 weights, and only the pairs that the cut
separates are kept. On tensor cores this is cheaper than 6 kinds of smaller products. Products of gates are
sums of their logarithms, which tensor cores also compute; no exponent is positive.

Memory besides the results: 256 bytes per token and query head, and for every 64 tokens one fp32 state, or two
in the backward pass.
"""

from torch import Tensor

from unrolled.ops.gla import packed
from unrolled.ops.gla.packed import Inputs
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
    from unrolled.ops.gla.triton_launch import Problem

    with on(inputs.q.device):
        problem = Problem(inputs, cu_seqlens)
        states, _, after = problem.states()
        return problem.outputs(problem.weights(), states), after


def _backward(
    grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None
) -> tuple[Tensor, ...]:
    from unrolled.ops.gla.triton_launch import Problem

    with on(inputs.q.device):
        problem = Problem(inputs, cu_seqlens)
        pairs = problem.weights()
        states, through, _ = problem.states()
        d_states, d_first = problem.state_gradients(grad_o, through, grad_state)
        dv = problem.value_gradients(grad_o, pairs, d_states)
        dq, dk, d_log_decay = problem.feature_gradients(grad_o, pairs, states, d_states)
        return dq, dk, dv, d_log_decay, d_first


def _described(kind: str, inputs: Inputs) -> Call:
    (*_, H, R), (*_, G, M) = inputs.q.shape, inputs.v.shape
    name = "linear attention with a gate for every feature"
    return Call(name, kind, inputs.q.device, inputs.q.dtype, (R, M), True, (H // max(G, 1),))


def _example(call: Call) -> Example:
    """Make the arguments of a small call, and its results in fp64."""
    (R, M), (P,), T = call.widths, call.others, TOKENS
    random = random_tensors(call.device)
    q, k, v = (random(1, T, *sizes, dtype=call.dtype) for sizes in ((P, R), (1, R), (1, M)))
    inputs = Inputs(q, k, v, -random(1, T, 1, R).abs() / 20, random(1, 1, R, M))
    exact = Inputs(*(x.double() for x in inputs))
    if call.kind == "forward":
        o, after = packed.forward(exact, None)
        return Example((inputs, None), {"the output": o, "the state": after})
    grads = random(1, T, P, M, dtype=call.dtype), random(1, 1, R, M)
    found = packed.backward(grads[0].double(), grads[1].double(), exact, None)
    names = (f"the gradient of {name}" for name in ("q", "k", "v", "log_decay", "the state"))
    return Example((*grads, inputs, None), dict(zip(names, found, strict=True)))
