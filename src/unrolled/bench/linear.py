"""Cases of causal normalised linear attention, forward and with gradients, against everything there is."""

from collections.abc import Callable
from functools import partial

import torch

from unrolled.bench import flops, peers
from unrolled.bench.attention import DEVICES, WIDTH, Inputs, contender, define, loading, random_inputs
from unrolled.bench.case import Case, Contender, Definition, NotMeasuredError, Problem, Settings
from unrolled.ops.linear import linear_attention, operator

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384)
QUICK = (64, 128)


def problem(length: int, settings: Settings, *, gradients: bool) -> Problem:
    """Compare all contenders at one length."""
    inputs = random_inputs(length, settings)
    add = partial(contender, inputs=inputs, gradients=gradients)
    half = partial(contender, inputs=inputs.to(torch.bfloat16), gradients=gradients, device="cuda")
    contenders = [
        *(ours(backend, inputs, gradients) for backend in operator.BACKENDS),
        add("chunked PyTorch", lambda: peers.chunked, definition="linear", heads_first=True),
        add("fast-transformers", peers.idiap, definition="linear", heads_first=True),
        add("fla naive chunk", peers.fla_naive, definition="linear"),
        _onnxruntime(inputs, settings, gradients),
        add("torch SDPA", lambda: peers.sdpa, definition="softmax", heads_first=True),
        *(
            half(f"fla {name}, bf16", partial(peers.fla_triton, name), definition="linear, bf16")
            for name in ("chunk_linear_attn", "fused_recurrent_linear_attn")
        ),
        half("SDPA flash, bf16", lambda: peers.flash, definition="softmax, bf16", heads_first=True),
    ]
    return Problem(contenders, define_all(inputs, gradients))


def ours(
    backend: str, inputs: Inputs, gradients: bool, *, suffix: str = "", threads: int | None = None
) -> Contender:
    """Make a contender of one of our backends."""

    half = ", bf16" if inputs.q.dtype == torch.bfloat16 else ""
    return contender(
        f"unrolled {backend}{suffix}",
        loading(backend, partial(linear_attention, causal=True, backend=backend)),
        inputs,
        gradients=gradients,
        definition=f"linear{half}",
        ours=True,
        threads=threads,
        device=DEVICES.get(backend),
    )


def define_all(inputs: Inputs, gradients: bool) -> dict[str, Definition]:
    """Define linear attention, also not normalised, and softmax, of the inputs and of them in bf16."""
    found = {}
    for suffix, rounded in (("", inputs), (", bf16", inputs.to(torch.bfloat16))):
        for name in ("linear", "linear, not normalised", "softmax"):
            found[name + suffix] = define(
                rounded,
                gradients=gradients,
                operations=_operations(name, inputs.q.shape[1], gradients),
                softmax=name == "softmax",
                normalize=name != "linear, not normalised",
            )
    return found


def _operations(function: str, length: int, gradients: bool) -> int:
    if function == "softmax":
        sizes = (flops.pairs_within(length, None, 0), length, WIDTH, WIDTH)
        return flops.softmax_attention(*sizes) + gradients * flops.softmax_attention_gradient(*sizes)
    forward = flops.linear_attention(length, WIDTH, WIDTH, normalize=function == "linear")
    return forward + gradients * flops.linear_attention_gradient(length, WIDTH, WIDTH)


def _onnxruntime(inputs: Inputs, settings: Settings, gradients: bool) -> Contender:
    def prepare() -> Callable[[], list[torch.Tensor]]:
        if gradients:
            raise NotMeasuredError("it has no gradient")
        if inputs.q.is_cuda:
            raise NotMeasuredError("it runs on --device cpu")
        attention = peers.onnxruntime_linear(*inputs[:3], settings.threads)
        return lambda: [attention()]

    return Contender("ONNX Runtime, not normalised", prepare, "linear, not normalised")


CASES = [
    Case(
        "linear-forward",
        "Causal normalised linear attention, fp32, B = 1, H = 8, D = M = 64.",
        "N",
        LENGTHS,
        QUICK,
        partial(problem, gradients=False),
        memory=True,
    ),
    Case(
        "linear-training",
        "The same, forward and backward.",
        "N",
        LENGTHS,
        QUICK,
        partial(problem, gradients=True),
        memory=True,
    ),
]
