"""Cases of sliding-window softmax attention against dense softmax attention."""

from functools import partial

from unrolled.bench import peers
from unrolled.bench.attention import PASSES, Function, contender, define, ours, random_inputs
from unrolled.bench.case import Case, NotMeasuredError, Problem, Settings
from unrolled.ops.window import operator, window_attention

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
QUICK = (64, 128)
DENSE_UP_TO = 8192  # beyond, one run takes many seconds


def problem(length: int, settings: Settings, *, left: int, right: int, gradients: bool) -> Problem:
    """Compare our backends and dense attention at one length."""
    inputs = random_inputs(length, settings)
    dense_right = 0 if right == 0 else None

    def dense() -> Function:
        if length > DENSE_UP_TO:
            raise NotMeasuredError(f"dense attention is measured up to N = {DENSE_UP_TO:,}")
        return partial(peers.sdpa, causal=right == 0)

    window = partial(window_attention, window_size=(left, right))
    contenders = [
        *(ours(x, window, inputs, gradients=gradients, definition="window") for x in operator.BACKENDS),
        contender(
            "torch SDPA, dense", dense, inputs, gradients=gradients, definition="dense", heads_first=True
        ),
    ]
    kinds = {
        name: define(inputs, gradients=gradients, softmax=True, left=first, right=last)
        for name, first, last in (("window", left, right), ("dense", None, dense_right))
    }
    return Problem(contenders, kinds)


CASES = [
    Case(
        f"window-{left}-{right}{suffix}",
        f"Softmax attention to {left} tokens before and {right} after, {what}.",
        "N",
        LENGTHS,
        QUICK,
        partial(problem, left=left, right=right, gradients=gradients),
        memory=True,
    )
    for left, right in ((128, 0), (128, 128))
    for gradients, suffix, what in PASSES
]
