"""Cases of causal normalised linear attention, forward and with gradients, against other libraries."""

from collections.abc import Callable
from functools import partial

import torch

from unrolled.bench import attention, peers
from unrolled.bench.attention import PASSES, Inputs, contender, define, random_inputs
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
    return attention.ours(
        backend,
        partial(linear_attention, causal=True),
        inputs,
        gradients=gradients,
        definition="linear, bf16" if inputs.q.dtype == torch.bfloat16 else "linear",
        suffix=suffix,
        threads=threads,
    )


def define_all(inputs: Inputs, gradients: bool) -> dict[str, Definition]:
    """Define linear attention, normalised and not, and softmax attention, of fp32 and of bf16 inputs."""
    return {
        name + suffix: define(rounded, gradients=gradients, softmax=softmax, normalize=normalize)
        for suffix, rounded in (("", inputs), (", bf16", inputs.to(torch.bfloat16)))
        for name, softmax, normalize in (
            ("linear", False, True),
            ("linear, not normalised", False, False),
            ("softmax", True, True),
        )
    }


def _onnxruntime(inputs: Inputs, settings: Settings, gradients: bool) -> Contender:
    def prepare() -> Callable[[], list[torch.Tensor]]:
        if gradients:
            raise NotMeasuredError("it has no gradient")
        if inputs.q.is_cuda:
            raise NotMeasuredError("it runs on --device cpu")
        bound = peers.onnxruntime_linear(*inputs[:3], settings.threads)
        return lambda: [bound()]

    return Contender("ONNX Runtime, not normalised", prepare, "linear, not normalised")


CASES = [
    Case(
        f"linear{suffix or '-forward'}",
        f"Causal normalised linear attention, fp32, B = 1, H = 8, D = M = 64, {what}.",
        "N",
        LENGTHS,
        QUICK,
        partial(problem, gradients=gradients),
        memory=True,
    )
    for gradients, suffix, what in PASSES
]
