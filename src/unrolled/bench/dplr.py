"""Cases of the rule of RWKV-7, beside linear attention with the same gates."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unrolled.bench import definitions, flops
from unrolled.bench.attention import PASSES, RESULTS, WIDTH, random_inputs
from unrolled.bench.case import Case, Problem, Settings
from unrolled.bench.gla import define, ours, random_gates
from unrolled.ops.dplr import dplr
from unrolled.ops.gla import diagonal_linear_attention


def problem(length: int, settings: Settings, *, gradients: bool) -> Problem:
    """Compare all contenders at one length."""
    inputs = random_inputs(length, settings)
    gates, _ = random_gates(inputs)
    a = normalize(inputs.k - 1, dim=-1)
    b = -a * torch.sigmoid(inputs.v)
    kinds = {"dplr": [*inputs[:3], a, b, gates], "gla": [*inputs[:3], gates]}
    run = partial(ours, grad_o=inputs.grad_o, gradients=gradients)
    contenders = [
        *(run(backend, backend, _output, kinds["dplr"], "dplr") for backend in ("native", "plain")),
        run("native, linear attention", "native", diagonal_linear_attention, kinds["gla"], "gla"),
    ]
    sizes = (length, WIDTH, WIDTH)
    operations = flops.dplr(*sizes) + gradients * flops.dplr_gradient(*sizes)
    of_gla = flops.gated_linear_attention(*sizes, gradients=gradients)
    names = (*RESULTS, "dlog_decay")
    define_one = partial(define, grad_o=inputs.grad_o, gradients=gradients)
    return Problem(
        contenders,
        {
            "dplr": define_one(
                definitions.dplr,
                kinds["dplr"],
                names=(*RESULTS, "da", "db", "dlog_decay"),
                operations=operations,
            ),
            "gla": define_one(definitions.gated, kinds["gla"], names=names, operations=of_gla),
        },
    )


def _output(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor) -> Tensor:
    return dplr(q, k, v, a, b, log_decay)[0]


CASES = [
    Case(
        f"dplr{suffix}",
        f"The rule of RWKV-7, fp32, {what}.",
        "N",
        (1024, 4096),
        (64, 128),
        partial(problem, gradients=gradients),
    )
    for gradients, suffix, what in PASSES
]
