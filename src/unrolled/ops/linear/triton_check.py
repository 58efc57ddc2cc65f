"""Small calls of linear attention, by which its compiled Triton kernels are checked at first use."""

from torch import Tensor

from unrolled.ops.linear import chunked
from unrolled.ops.linear.chunked import Inputs, Options, OutputGradients, Token
from unrolled.ops.triton.check import TOKENS, Call, Example, random_tensors

OUTPUTS = ("the output", "S", "z")
GRADIENTS = tuple(f"the gradient of {name}" for name in ("q", "k", "v", "log_decay", "S", "z"))


def described(kind: str, inputs: Inputs | Token, causal: bool, normalize: bool) -> Call:
    """Describe a call by its inputs, whose heads and widths are the last two axes."""
    (H, R), (G, M), gated = inputs.q.shape[-2:], inputs.v.shape[-2:], inputs.log_decay is not None
    others = H // max(G, 1), causal, normalize
    return Call("linear attention", kind, inputs.q.device, inputs.q.dtype, (R, M), gated, others)


def example(call: Call) -> Example:
    """Make the arguments of a small call, and its results in fp64."""
    (R, M), (P, *flags), T = call.widths, call.others, 1 if call.kind == "step" else TOKENS
    causal, normalize = map(bool, flags)
    random = random_tensors(call.device)
    q, k = (random(1, T, heads, R).abs().add(0.5).to(call.dtype) for heads in (P, 1))
    v = random(1, T, 1, M, dtype=call.dtype)
    # weak gates, so that the initial state reaches the final one
    gates = -random(1, T, 1).abs() / 20 if call.gated else None
    inputs = Inputs(q, k, v, gates, random(1, 1, R, M), random(1, 1, R).abs())
    exact = Inputs(*(None if x is None else x.double() for x in inputs))  # type: ignore[arg-type]
    o, *state, den = chunked.forward(exact, causal, normalize)
    if call.kind == "forward":
        return _named((*OUTPUTS, "the divisor"), (o, *state, den), inputs, Options(None, causal, normalize))
    if call.kind == "step":
        gate = None if gates is None else gates[:, 0]
        token = Token._make((q[:, 0], k[:, 0], v[:, 0], inputs.kv, inputs.k_sum, gate))
        return _named(OUTPUTS, (o[:, 0], *state), token, normalize)
    grads = OutputGradients(random(1, T, P, M, dtype=call.dtype), random(1, 1, R, M), random(1, 1, R))
    exact_grads = OutputGradients(*(x.double() for x in grads))
    expected = chunked.backward(exact_grads, exact, den, causal, normalize)
    return _named(
        GRADIENTS, expected, grads, inputs, den.float().contiguous(), Options(None, causal, normalize)
    )


def _named(names: tuple[str, ...], results: tuple[Tensor, ...], *arguments: object) -> Example:
    return Example(arguments, dict(zip(names, results, strict=True)))
