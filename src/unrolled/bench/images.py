"""The case of images drawn level by level (tables 1 and 2 of Katharopoulos et al. 2020, arXiv 2006.16236).

The time of a level depends on its position n, at most as n^2 where everything is computed again. So the mean
over an image of N levels is that of the two positions N/2 (1 - 1/sqrt 3) and N/2 (1 + 1/sqrt 3): Gauss's rule
with two points is exact for polynomials up to n^3.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unrolled.bench import measure
from unrolled.bench.case import Case, Contender, Definition, Problem, Settings
from unrolled.bench.models import decoder, exact_logits, rounding_bound
from unrolled.decode import Plan
from unrolled.models import Decoder

BATCH = 16
LAYERS = {784: 8, 3072: 16}  # of the paper's models for MNIST and CIFAR-10


def images(levels: int, settings: Settings) -> Problem:
    """Draw a level of each of `BATCH` images, at the two positions."""
    positions = [round(levels / 2 * (1 + sign / math.sqrt(3))) for sign in (-1, 1)]
    linear, softmax = (
        decoder(attention, settings, layers=LAYERS.get(levels)).eval() for attention in ("linear", "softmax")
    )
    contenders = [
        Contender("unrolled linear", partial(_stepping, linear, positions), "linear", ours=True),
        Contender(
            "unrolled softmax, with a cache", partial(_stepping, softmax, positions), "softmax", ours=True
        ),
        Contender(
            "unrolled softmax, without", partial(_recomputing, softmax, positions), "softmax", ours=True
        ),
    ]
    kinds = {
        str(model.config.attention): Definition(
            partial(_exact, model, positions),
            ["logits"],
            rounding_bound(model, levels),
            compared=lambda x: x[:1],
        )
        for model in (linear, softmax)
    }
    return Problem(contenders, kinds, len(positions), BATCH, partial(_remark, levels))


def _stepping(model: Decoder, positions: list[int]) -> Callable[[], list[Tensor]]:
    """Carry a state on; it moves by a token with each run, too few to matter."""
    runner = measure.planned(model)
    options = {"in_place": True} if isinstance(runner, Plan) else {}
    tokens = measure.random_tokens(model, positions[-1] + 1, BATCH)
    with torch.inference_mode():
        states = [runner.prefill(tokens[:, :n], runner.init_state(BATCH))[1] for n in positions]

    @torch.inference_mode()
    def run() -> list[Tensor]:
        logits: list[Any] = []
        for i, n in enumerate(positions):
            y, states[i] = runner.step(tokens[:, n], states[i], **options)
            logits.append(y)
        return [torch.stack(logits, 1)]

    return run


def _recomputing(model: Decoder, positions: list[int]) -> Callable[[], list[Tensor]]:
    """Compute all again for each level."""
    tokens = measure.random_tokens(model, positions[-1] + 1, BATCH)

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [torch.stack([model(tokens[:, : n + 1])[:, -1] for n in positions], 1)]

    return run


def _exact(model: Decoder, positions: list[int]) -> list[Tensor]:
    tokens = measure.random_tokens(model, positions[-1] + 1, BATCH)
    return [logits[:, positions] for logits in exact_logits(model, tokens[:1])]


def _remark(levels: int, medians: Mapping[str, float]) -> str:
    """Tell the images per second."""
    speeds = [f"{BATCH / levels / median:.3g} ({name})" for name, median in medians.items()]
    return f"Images per second: {', '.join(speeds)}." if speeds else ""


CASES = [
    Case(
        "images",
        f"A level of each of {BATCH} images, by decoders of the sizes for MNIST (784) and CIFAR-10 (3,072).",
        "levels",
        tuple(LAYERS),
        (12, 20),
        images,
    ),
]
