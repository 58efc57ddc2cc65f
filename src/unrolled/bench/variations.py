"""Cases that compare linear attention with itself: bf16, two threads, alternating with torch's products."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from unrolled.bench import peers
from unrolled.bench.attention import PASSES, contender, random_inputs
from unrolled.bench.case import Case, Contender, Definition, Problem, Settings, tolerance
from unrolled.bench.linear import define_all, ours
from unrolled.ops.linear import linear_attention, operator

COLUMNS = 512  # columns of the matrix that torch multiplies by
TURNS = 4


def types(length: int, settings: Settings, *, gradients: bool) -> Problem:
    """Compare bf16 with fp32 inputs, for each backend."""
    inputs = random_inputs(length, settings)
    contenders = [
        ours(backend, inputs.to(dtype), gradients, suffix=f", {name}")
        for backend in operator.BACKENDS
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    ]
    remark = partial(_ratios, "bf16 inputs take", ", fp32", ", bf16")
    return Problem(contenders, define_all(inputs, gradients), remark=remark)


def two_threads(length: int, settings: Settings, *, gradients: bool) -> Problem:
    """Compare one thread with two, for each backend and for plain PyTorch."""
    inputs = random_inputs(length, settings)
    contenders = []
    for threads in (1, 2):
        on = f", {threads} thread{'s' * (threads > 1)}"
        contenders += [ours(x, inputs, gradients, suffix=on, threads=threads) for x in operator.BACKENDS]
        contenders.append(
            contender(
                f"chunked PyTorch{on}",
                lambda: peers.chunked,
                inputs,
                gradients=gradients,
                definition="linear",
                heads_first=True,
                threads=threads,
            )
        )
    remark = partial(_ratios, "two threads take", ", 1 thread", ", 2 threads")
    return Problem(contenders, define_all(inputs, gradients), remark=remark)


def alternation(length: int, settings: Settings) -> Problem:
    """Run our attention and a matrix product of torch in turn on two threads, and each alone.

    The times show that both share one thread pool.
    """
    inputs = random_inputs(length, settings)
    a = inputs.q[0].flatten(1)
    b = torch.randn(a.shape[1], COLUMNS, generator=torch.Generator().manual_seed(0)).to(a.device)

    def attend() -> Tensor:
        return linear_attention(inputs.q, inputs.k, inputs.v, causal=True)

    def multiply() -> Tensor:
        return a @ b

    def repeated(name: str, definition: str, *jobs: Callable[[], Tensor]) -> Contender:
        def run() -> Sequence[Tensor]:
            with torch.inference_mode():
                return [job() for _ in range(TURNS) for job in jobs][-len(jobs) :]

        return Contender(name, lambda: run, definition, ours=True, threads=2)

    linear = define_all(inputs, False)["linear"]
    allowed, operations = tolerance(a.dtype, a.shape[1]), 2 * a.numel() * COLUMNS
    product = Definition(lambda: [a.double() @ b.double()], ["product"], allowed, operations)
    names = [*linear.names, *product.names]
    both = Definition(
        lambda: [*linear.results, *product.results], names, max(linear.allowed, product.allowed)
    )
    contenders = [
        repeated("attention alone", "attention", attend),
        repeated("product alone", "product", multiply),
        repeated("in turn", "both", attend, multiply),
    ]
    kinds = {"attention": linear, "product": product, "both": both}
    return Problem(contenders, kinds, steps=TURNS, remark=_together)


def _together(medians: Mapping[str, float]) -> str:
    if len(medians) < 3:
        return ""
    share = medians["in turn"] / (medians["attention alone"] + medians["product alone"])
    return f"in turn they take {share:.2f} of the time of both alone."


def _ratios(words: str, one: str, other: str, medians: Mapping[str, float]) -> str:
    """Compare the times of every contender that was measured both ways."""
    names = [name.removesuffix(one) for name in medians if name.endswith(one)]
    parts = [f"{medians[x + other] / medians[x + one]:.2f} ({x})" for x in names if x + other in medians]
    return f"{words} {', '.join(parts)} of the time of{one.removeprefix(',')}." if parts else ""


CASES = [
    Case(f"{name}{suffix}", f"{about}, {what}.", "N", (4096,), (128,), partial(problem, gradients=gradients))
    for name, about, problem in (
        ("linear-bf16", "bf16 beside fp32 inputs of linear attention", types),
        ("threads", "Two threads beside one in linear attention", two_threads),
    )
    for gradients, suffix, what in PASSES
]
TOGETHER = f"Linear attention and a matrix product of torch's, {TURNS} times in turn on two threads."
CASES.append(Case("alternation", TOGETHER, "N", (4096,), (128,), alternation))
