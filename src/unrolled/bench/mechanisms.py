"""Cases of whole layers: every mechanism by its name, as the length grows, or the window."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unrolled import attention
from unrolled.bench.case import (
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
QUADRATIC, LONGEST = ("similarity", "topk"), 4096  # beyond, they need gigabytes or minutes
OPTIONS: dict[str, dict[str, Any]] = {
    "aft": {"position_bias": "local"}
}  # AFT's default is quadratic in memory
WINDOWED = {  # the option that sets how many tokens a mechanism reads around a query
    "window": "window",
    "longformer": "window",
    "long_short": "window",
    "bigbird": "block_size",
    "sparse_transformer": "stride",
    "reformer": "chunk",
}
WINDOW_LENGTH = 4096
MOVES = 3  # perturbations; a single one may have little effect by chance
STAGES = 4  # consecutive sums over the length in a layer and its gradient


def mechanisms(length: int, settings: Settings, *, causal: bool) -> Problem:
    """Run every mechanism that can be causal, or bidirectional, forward and backward."""
    chosen = {}
    for name in attention.names():
        mechanism: Any = attention.load(name)
        if mechanism.supports.causal if causal else mechanism.supports.bidirectional:
            chosen[name] = OPTIONS.get(name, {})
    return problem(chosen, length, settings, causal=causal)


def windows(window: int, settings: Settings) -> Problem:
    """Run the mechanisms that read some tokens around each query, and softmax, which reads all."""
    chosen = {name: {option: window} for name, option in WINDOWED.items()} | {"softmax": {}}
    return problem(chosen, min(WINDOW_LENGTH, 8 * window) if settings.quick else WINDOW_LENGTH, settings)


def problem(
    chosen: Mapping[str, Mapping[str, Any]], length: int, settings: Settings, *, causal: bool = False
) -> Problem:
    """Run mechanisms with their options on one sequence, forward and backward."""
    x = torch.randn(1, length, D_MODEL, generator=torch.Generator().manual_seed(0)).to(settings.device)
    contenders, definitions = [], dict[str, Definition]()
    for name, options in chosen.items():
        make = partial(layer, name, length, causal, options)

        def prepare(name: str = name, make: Callable[[], nn.Module] = make) -> Callable[[], Sequence[Tensor]]:
            if reason := too_long(name, length):
                raise NotMeasuredError(reason)
            return partial(run, make().to(settings.device), x)

        def compute(make: Callable[[], nn.Module] = make) -> Sequence[Tensor]:
            return run(make().to(settings.device).double(), x.double())

        def allowed(name: str = name, make: Callable[[], nn.Module] = make) -> float:
            return rounding(definitions[name].results, make, x)

        definitions[name] = Definition(compute, ["output", "gradient of the input"], allowed)
        contenders.append(Contender(f"unrolled {name}", prepare, name, ours=True))
    return Problem(contenders, definitions, tokens=length)


def too_long(name: str, length: int) -> str:
    """Return why a mechanism is not measured at this length; empty if it is."""
    if name in QUADRATIC and length > LONGEST:
        return f"quadratic in the length, so up to {LONGEST:,} tokens only"
    return ""


def rounding(exact: Sequence[Tensor], make: Callable[[], nn.Module], x: Tensor) -> float:
    """Bound the rounding error of `exact`: that of the sums in a layer, and that of its inputs and weights.

    The error from inputs and weights depends on the conditioning of the mechanism, so it is measured: every
    input and weight of the fp64 layer is perturbed by one unit roundoff of fp32.
    """
    unit, generator = torch.finfo(torch.float32).eps / 2, torch.Generator().manual_seed(1)

    def moved(y: Tensor) -> Tensor:
        signs = torch.randint(2, y.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return y.detach().double() * (1 + unit * signs.to(y.device))

    effects = []
    for _ in range(MOVES):
        module = make().to(x.device).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(moved(parameter))
        changed = zip(run(module, moved(x)), exact, strict=True)
        effects += [float((a - b).abs().max() / b.abs().max()) for a, b in changed]
    return tolerance(torch.float32, STAGES * x.shape[1]) + LAMBDA * max(effects)


def layer(name: str, length: int, causal: bool, options: Mapping[str, Any]) -> nn.Module:
    """Make a layer of a mechanism for sequences of this length, with the same weights in every call."""
    mechanism: Any = attention.load(name)
    bound = {"max_length": length} if mechanism.supports.max_length else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: nn.Module = mechanism(D_MODEL, N_HEADS, causal=causal, **bound, **options)
        return module


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
CASES.append(
    Case(
        "mechanisms-window",
        f"Layers {D_MODEL} wide with {N_HEADS} heads on {WINDOW_LENGTH:,} tokens, forward and backward: "
        "how many tokens each reads around a query (of BigBird its block, of the sparse transformer "
        "its stride, of Reformer its chunk).",
        "window",
        (32, 64, 128, 256, 512),
        (8, 16),
        windows,
        memory=True,
    )
)
