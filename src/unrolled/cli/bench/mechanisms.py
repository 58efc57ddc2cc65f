"""Cases of whole layers: every mechanism by its name, and how its time and memory grow with the length."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unrolled import attention
from unrolled.cli.bench.case import (
    LAMBDA,
    Case,
    Contender,
    Definition,
    NotMeasuredError,
    Problem,
    Settings,
    tolerance,
)

D_MODEL, N_HEADS = 128, 4
QUADRATIC, LONGEST = ("similarity", "topk"), 4096  # beyond, they want gigabytes or minutes
OPTIONS = {"aft": {"position_bias": "local"}}  # its default is quadratic in memory
MOVES = 3  # of all numbers; where few of them decide, as in the first tokens, one may do little by chance
STAGES = 4  # sums over the length that follow each other in a layer and its gradient


def mechanisms(length: int, settings: Settings, *, causal: bool) -> Problem:
    """Run every mechanism that can be causal, or bidirectional, forward and backward."""
    x = torch.randn(1, length, D_MODEL, generator=torch.Generator().manual_seed(0)).to(settings.device)
    contenders, definitions = [], {}
    for name in attention.names():
        mechanism: Any = attention.load(name)
        if not (mechanism.supports.causal if causal else mechanism.supports.bidirectional):
            continue

        def prepare(name: str = name) -> Callable[[], Sequence[Tensor]]:
            if name in QUADRATIC and length > LONGEST:
                raise NotMeasuredError(f"quadratic in the length, so up to {LONGEST:,} tokens only")
            return partial(run, layer(name, length, causal).to(settings.device), x)

        def compute(name: str = name) -> Sequence[Tensor]:
            return run(layer(name, length, causal).to(settings.device).double(), x.double())

        names = ["output", "gradient of the input"]
        definitions[name] = Definition(compute, names, partial(rounding, compute, name, length, causal, x))
        contenders.append(Contender(f"unrolled {name}", prepare, name, ours=True))
    return Problem(contenders, definitions, tokens=length)


def rounding(
    compute: Callable[[], Sequence[Tensor]], name: str, length: int, causal: bool, x: Tensor
) -> float:
    """Bound what rounding may do: that of the sums in a layer, and that of its inputs and weights.

    The second depends on how well conditioned a mechanism is. So it is measured, by moving every number that
    goes into the exact layer by one unit of fp32.
    """
    unit, generator = torch.finfo(torch.float32).eps / 2, torch.Generator().manual_seed(1)

    def moved(y: Tensor) -> Tensor:
        signs = torch.randint(2, y.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return y.detach().double() * (1 + unit * signs.to(y.device))

    exact, effects = compute(), []
    for _ in range(MOVES):
        module = layer(name, length, causal).to(x.device).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(moved(parameter))
        changed = zip(run(module, moved(x)), exact, strict=True)
        effects += [float((a - b).abs().max() / b.abs().max()) for a, b in changed]
    return tolerance(torch.float32, STAGES * length) + LAMBDA * max(effects)


def layer(name: str, length: int, causal: bool) -> nn.Module:
    """Make a layer of a mechanism for so many tokens; the same one every time."""
    mechanism = attention.load(name)
    bounded = "max_length" in inspect.signature(mechanism).parameters
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = ({"max_length": length} if bounded else {}) | OPTIONS.get(name, {})
        return mechanism(D_MODEL, N_HEADS, causal=causal, **options)


def run(module: nn.Module, x: Tensor) -> Sequence[Tensor]:
    """Return the output and the gradient of the input; those of the weights are computed too."""
    x = x.detach().requires_grad_()
    weights = [p for p in module.parameters() if p.requires_grad]
    y = module(x)
    gradient, *_ = torch.autograd.grad(y.square().sum() / 2, [x, *weights], allow_unused=True)
    return [y.detach(), gradient]


CASES = [
    Case(
        name,
        f"Every mechanism that is {kind}, a layer {D_MODEL} wide with {N_HEADS} heads, forward and backward, "
        "with its default options (but AFT-local).",
        "N",
        (1024, 2048, 4096, 8192, 16384),
        (64, 128),
        partial(mechanisms, causal=kind == "causal"),
        memory=True,
    )
    for name, kind in (("mechanisms", "bidirectional"), ("mechanisms-causal", "causal"))
]
