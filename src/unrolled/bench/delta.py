"""Cases of the delta rule with a gate for every feature of the keys, beside a gate for every head."""

from functools import partial

from torch import Tensor
from torch.nn.functional import normalize

from unrolled.bench import definitions, flops
from unrolled.bench.attention import PASSES, RESULTS, WIDTH, random_inputs
from unrolled.bench.case import Case, Problem, Settings
from unrolled.bench.gla import define, ours, random_gates
from unrolled.ops.delta import delta_rule


def problem(length: int, settings: Settings, *, gradients: bool) -> Problem:
    """Compare all contenders at one length."""
    inputs = random_inputs(length, settings)
    rule = [normalize(inputs.q, dim=-1), normalize(inputs.k - 1, dim=-1), inputs.v]
    rates = inputs.v[..., 0].sigmoid()
    by_feature, by_head = random_gates(inputs)
    kinds = {"channel": [*rule, rates, by_feature], "head": [*rule, rates, by_head]}
    run = partial(ours, grad_o=inputs.grad_o, gradients=gradients)
    contenders = [
        run(f"{backend}, a gate per {kind}", backend, _output, x, kind)
        for kind, x in kinds.items()
        for backend in ("native", "plain")
    ]
    sizes = (length, WIDTH, WIDTH)
    operations = flops.delta_rule(*sizes) + gradients * flops.delta_rule_gradient(*sizes)
    names = (*RESULTS, "dbeta", "dlog_decay")
    define_one = partial(
        define, grad_o=inputs.grad_o, gradients=gradients, names=names, operations=operations
    )
    return Problem(contenders, {kind: define_one(definitions.delta, x) for kind, x in kinds.items()})


def _output(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return delta_rule(q, k, v, beta, log_decay=log_decay)[0]


CASES = [
    Case(
        f"delta{suffix}",
        f"The delta rule with a gate for every feature of the keys, fp32, {what}.",
        "N",
        (1024, 4096),
        (64, 128),
        partial(problem, gradients=gradients),
    )
    for gradients, suffix, what in PASSES
]
