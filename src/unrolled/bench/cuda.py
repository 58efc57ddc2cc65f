"""Cases of recurrent attention on CUDA in bf16, beside flash-linear-attention and FlashAttention-2."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu, logsigmoid, normalize

from unrolled.bench import definitions, peers
from unrolled.bench.attention import PASSES, RESULTS
from unrolled.bench.case import Case, Contender, Definition, NotMeasuredError, Problem, Settings, tolerance
from unrolled.bench.gla import Function, bind
from unrolled.ops.delta import delta_rule
from unrolled.ops.dispatch import prefer
from unrolled.ops.gla import diagonal_linear_attention
from unrolled.ops.linear import linear_attention
from unrolled.ops.triton.check import required

HEADS, WIDTH = 16, 64
TOKENS = 32_768  # of all sequences together
BACKENDS = ("triton", "plain")


class Inputs(NamedTuple):
    """Arguments of all rules, and the gradient of the output: `[B,N,H,D]`, but beta and gates `[B,N,H]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_o: Tensor
    beta: Tensor
    gates: Tensor
    gates_of_features: Tensor


class Rule(NamedTuple):
    """A recurrence in three forms, which take the same arguments.

    Attributes:
        name, about: of its cases.
        arguments: chooses them from the inputs.
        names: their names.
        ours: the form of this library.
        peer: imports that of flash-linear-attention.
        define: the definition.
    """

    name: str
    about: str
    arguments: Callable[[Inputs], Sequence[Tensor]]
    names: tuple[str, ...]
    ours: Function
    peer: Callable[[], Function]
    define: Function


def sequences(length: int, settings: Settings) -> int:
    """How many sequences of this length there are."""
    return 1 if settings.quick else max(1, TOKENS // length)


def random_inputs(length: int, settings: Settings) -> Inputs:
    """Draw normal numbers; beta is between 0 and 1, gates are logarithms close to 0."""
    generator = torch.Generator(settings.device).manual_seed(length)
    shape = sequences(length, settings), length, HEADS, WIDTH
    q, k, v, grad_o, noise = (
        torch.randn(shape, generator=generator, device=settings.device) for _ in range(5)
    )
    gates, beta = logsigmoid(noise) / 16, noise[..., 0].sigmoid()
    q, k, v, grad_o = (x.bfloat16() for x in (q, k, v, grad_o))
    return Inputs(q, k, v, grad_o, beta.bfloat16(), gates[..., 0].contiguous(), gates)


def problem(length: int, settings: Settings, *, rule: Rule, gradients: bool) -> Problem:
    """Compare all contenders at one length."""
    inputs = cache(partial(random_inputs, length, settings))  # not drawn where nothing runs
    arguments: dict[str, Callable[[], Sequence[Tensor]]] = {
        rule.name: cache(lambda: rule.arguments(inputs())),
        "softmax": lambda: inputs()[:3],
    }

    def run(name: str, load: Callable[[], Function], backend: str | None = None) -> Contender:
        kind = "softmax" if load is _flash else rule.name

        def prepare() -> Callable[[], Sequence[Tensor]]:
            if not settings.device.startswith("cuda"):
                raise NotMeasuredError("it runs on --device cuda")
            job = bind(load(), arguments[kind](), grad_o=inputs().grad_o, gradients=gradients)

            def with_kernels() -> Sequence[Tensor]:
                with nullcontext() if backend is None else prefer(backend), required():
                    return job()

            return with_kernels

        return Contender(name, prepare, kind, ours=backend is not None)

    def define(kind: str, function: Function, names: Sequence[str]) -> Definition:
        def compute() -> Sequence[Tensor]:
            exact = [compared(x).double() for x in arguments[kind]()]
            return bind(function, exact, grad_o=compared(inputs().grad_o).double(), gradients=gradients)()

        allowed = tolerance(torch.bfloat16, length + WIDTH)
        return Definition(compute, names if gradients else names[:1], allowed, compared=compared)

    contenders = [
        *(run(f"unrolled {backend}", lambda: rule.ours, backend) for backend in BACKENDS),
        run("fla", rule.peer),
        run("SDPA flash", _flash),
    ]
    defined = {
        rule.name: define(rule.name, rule.define, ("o", *(f"d{name}" for name in rule.names))),
        "softmax": define("softmax", partial(definitions.attention, softmax=True), RESULTS),
    }
    return Problem(contenders, defined, tokens=sequences(length, settings) * length)


def compared(x: Tensor) -> Tensor:
    """The first and the last head of the first sequence: the definitions take long."""
    return x[:1, :, :: HEADS - 1]


def _flash() -> Function:
    """Return FlashAttention-2, for `[B,N,H,D]`."""
    return lambda q, k, v: peers.flash(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _fla(module: str, name: str, **options: Any) -> Callable[[], Function]:
    """Return an import of a function of flash-linear-attention, of which only the output is wanted."""

    def load() -> Function:
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
        return lambda *arguments: function(*arguments, **options)[0]

    return load


def _gates_first(load: Callable[[], Function]) -> Callable[[], Function]:
    """Return an import of a function that takes its fourth and fifth argument in the other order."""

    def swapped() -> Function:
        function = load()
        return lambda q, k, v, beta, gates: function(q, k, v, gates, beta)

    return swapped


RULES = (
    Rule(
        "linear",
        "linear attention, normalised",
        lambda x: [elu(x.q) + 1, elu(x.k) + 1, x.v],
        ("q", "k", "v"),
        partial(linear_attention, causal=True),
        _fla("linear_attn", "chunk_linear_attn", normalize=True),
        partial(definitions.attention, softmax=False),
    ),
    Rule(
        "gated",
        "linear attention with a gate per head",
        lambda x: [x.q, x.k, x.v, x.gates],
        ("q", "k", "v", "gates"),
        lambda q, k, v, gates: linear_attention(q, k, v, causal=True, normalize=False, log_decay=gates),
        _fla("simple_gla", "chunk_simple_gla", scale=1.0),
        lambda q, k, v, gates: definitions.gated(q, k, v, gates[..., None]),
    ),
    Rule(
        "gla",
        "linear attention with a gate per feature",
        lambda x: [x.q, x.k, x.v, x.gates_of_features],
        ("q", "k", "v", "gates"),
        diagonal_linear_attention,
        _fla("gla", "chunk_gla", scale=1.0),
        definitions.gated,
    ),
    Rule(
        "delta",
        "the delta rule",
        lambda x: [normalize(x.q, dim=-1), normalize(x.k, dim=-1), x.v, x.beta],
        ("q", "k", "v", "beta"),
        lambda q, k, v, beta: delta_rule(q, k, v, beta)[0],
        _fla("delta_rule", "chunk_delta_rule", scale=1.0),
        lambda q, k, v, beta: definitions.delta(q, k, v, beta, torch.zeros_like(beta)),
    ),
    Rule(
        "gated-delta",
        "the delta rule with a gate per head",
        lambda x: [normalize(x.q, dim=-1), normalize(x.k, dim=-1), x.v, x.beta, x.gates],
        ("q", "k", "v", "beta", "gates"),
        lambda q, k, v, beta, gates: delta_rule(q, k, v, beta, log_decay=gates)[0],
        _gates_first(_fla("gated_delta_rule", "chunk_gated_delta_rule", scale=1.0)),
        definitions.delta,
    ),
)

CASES = [
    Case(
        f"cuda-{rule.name}{suffix}",
        f"On CUDA in bf16, {HEADS} heads of {WIDTH}, as many sequences as {TOKENS:,} tokens hold, at least "
        f"one: {rule.about}, {what}.",
        "N",
        (2048, 8192),
        (64,),
        partial(problem, rule=rule, gradients=gradients),
    )
    for rule in RULES
    for gradients, suffix, what in PASSES
]
