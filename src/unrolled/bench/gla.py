"""Cases of linear attention with a gate for every feature, beside a gate for every head."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unrolled.bench import definitions, flops
from unrolled.bench.attention import DEVICES, HEADS, PASSES, RESULTS, WIDTH, Inputs, random_inputs
from unrolled.bench.case import (
    Case,
    Contender,
    Definition,
    MissingError,
    NotMeasuredError,
    Problem,
    Settings,
    tolerance,
)
from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.ops.gla import diagonal_linear_attention
from unrolled.ops.linear import linear_attention
from unrolled.threads import cpu_threads

Function = Callable[..., Tensor]
COMPARED = (0, HEADS - 1)  # heads whose results are compared with the definition, which is slow


def problem(length: int, settings: Settings, *, gradients: bool) -> Problem:
    """Compare all contenders at one length."""
    inputs = random_inputs(length, settings)
    by_feature, by_head = random_gates(inputs)
    flat = partial(linear_attention, causal=True, normalize=False)
    kinds: dict[str, tuple[list[Tensor], Function]] = {
        "gla": ([*inputs[:3], by_feature], definitions.gated),
        "head": ([*inputs[:3], by_head], lambda q, k, v, gates: definitions.gated(q, k, v, gates[..., None])),
    }
    run = partial(ours, grad_o=inputs.grad_o, gradients=gradients)
    contenders = [
        *(run(x, x, diagonal_linear_attention, kinds["gla"][0], "gla") for x in ("native", "plain")),
        run(
            "native, a gate per head",
            "native",
            lambda q, k, v, gates: flat(q, k, v, log_decay=gates),
            kinds["head"][0],
            "head",
        ),
    ]
    operations = flops.gated_linear_attention(length, WIDTH, WIDTH, gradients=gradients)
    names = (*RESULTS, "dlog_decay")
    define_one = partial(
        define, grad_o=inputs.grad_o, gradients=gradients, names=names, operations=operations
    )
    return Problem(contenders, {name: define_one(function, x) for name, (x, function) in kinds.items()})


def random_gates(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Draw logarithms close to 0 for the gates of features; a head's gates are those of its first feature."""
    noise = torch.randn(inputs.k.shape, generator=torch.Generator().manual_seed(0)).to(inputs.k.device)
    gates = logsigmoid(noise) / 16
    return gates, gates[..., 0].contiguous()


def ours(
    name: str,
    backend: str,
    function: Function,
    inputs: Sequence[Tensor],
    definition: str,
    *,
    grad_o: Tensor,
    gradients: bool,
) -> Contender:
    """Make a contender of a function of these inputs, which runs with one of our backends."""

    def prepare() -> Callable[[], Sequence[Tensor]]:
        if DEVICES.get(backend, grad_o.device.type) != grad_o.device.type:
            raise NotMeasuredError(f"it runs on --device {DEVICES[backend]}")
        if backend == "native" and (why := native.missing()):
            raise MissingError(why)
        job = bind(function, inputs, grad_o=grad_o, gradients=gradients)

        def preferring() -> Sequence[Tensor]:
            with prefer(backend):
                return job()

        return preferring

    return Contender(f"unrolled {name}", prepare, definition, ours=True)


def bind(
    function: Function, inputs: Sequence[Tensor], *, grad_o: Tensor, gradients: bool
) -> Callable[[], Sequence[Tensor]]:
    """Make a job of a function: its output, and with `gradients` those of all inputs."""
    leaves = [x.clone().requires_grad_(gradients) for x in inputs]

    def job() -> Sequence[Tensor]:
        with torch.set_grad_enabled(gradients):
            o = function(*leaves)
            return [o, *torch.autograd.grad(o, leaves, grad_o)] if gradients else [o]

    return job


def define(
    function: Function,
    inputs: Sequence[Tensor],
    *,
    grad_o: Tensor,
    gradients: bool,
    names: Sequence[str],
    operations: int,
) -> Definition:
    """Define the results by a function that computes token by token; `operations` counts those of a head."""
    length, heads = grad_o.shape[1], list(COMPARED)

    def compared(x: Tensor) -> Tensor:
        return x[:, :, heads]

    def compute() -> Sequence[Tensor]:
        exact = [compared(x).double() for x in inputs]
        with cpu_threads(1):  # more threads only make such small steps slower, most of all on a busy machine
            return bind(function, exact, grad_o=compared(grad_o).double(), gradients=gradients)()

    return Definition(
        compute,
        names if gradients else names[:1],
        tolerance(grad_o.dtype, length + WIDTH),
        HEADS * operations,
        (2 if gradients else 1) * (sum(x.nbytes for x in inputs) + grad_o.nbytes),
        compared,
    )


CASES = [
    Case(
        f"gla{suffix}",
        f"Linear attention with a gate for every feature, fp32, {what}.",
        "N",
        (1024, 4096),
        (64, 128),
        partial(problem, gradients=gradients),
    )
    for gradients, suffix, what in PASSES
]
