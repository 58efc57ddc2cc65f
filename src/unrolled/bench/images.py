"""The cases of images drawn level by level (tables 1 and 2 of Katharopoulos et al. 2020, arXiv 2006.16236).

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
STEPS = 4  # steps of a run at each position, so that most follow a step of the same contender
RUNS = 8  # runs after which the states start anew, so that they stay near their positions
LAYERS = {784: 8, 3072: 16}  # layers of the paper's models for MNIST and CIFAR-10


def images(levels: int, settings: Settings) -> Problem:
    """Draw levels of `BATCH` images by states that are carried on."""
    positions = _positions(levels)
    linear, softmax = (_decoder(attention, levels, settings) for attention in ("linear", "softmax"))
    contenders = [
        Contender("unrolled linear", partial(_stepping, linear, positions), "linear", ours=True),
        Contender("unrolled softmax, cached", partial(_stepping, softmax, positions), "softmax", ours=True),
    ]
    kinds = {str(x.config.attention): _definition(x, levels) for x in (linear, softmax)}
    return Problem(contenders, kinds, STEPS * len(positions), BATCH, partial(_remark, levels))


def recomputed(levels: int, settings: Settings) -> Problem:
    """Draw levels of `BATCH` images by softmax attention, computing everything again for each level."""
    positions, model = _positions(levels), _decoder("softmax", levels, settings)
    prepare = partial(_recomputing, model, positions)
    contenders = [Contender("unrolled softmax, not cached", prepare, "softmax", ours=True)]
    kinds = {"softmax": _definition(model, levels)}
    return Problem(contenders, kinds, len(positions), BATCH, partial(_remark, levels))


def _positions(levels: int) -> list[int]:
    return [round(levels / 2 * (1 + sign / math.sqrt(3))) for sign in (-1, 1)]


def _decoder(attention: str, levels: int, settings: Settings) -> Decoder:
    return decoder(attention, settings, layers=LAYERS.get(levels)).eval()


def _stepping(model: Decoder, positions: list[int]) -> Callable[[], list[Tensor]]:
    """Read on from the states at the positions."""
    runner = measure.planned(model)
    options = {"in_place": True} if isinstance(runner, Plan) else {}
    tokens = measure.random_tokens(model, positions[-1] + 1, BATCH)
    with torch.inference_mode():
        starts = [runner.prefill(tokens[:, :n], runner.init_state(BATCH))[1] for n in positions]
        again = [measure.repeatable(runner, start, RUNS * STEPS) for start in starts]
    states, runs = list(starts), 0

    @torch.inference_mode()
    def run() -> list[Tensor]:
        nonlocal states, runs
        if runs % RUNS == 0:
            states = [begin() for begin in again]
        runs += 1
        first: list[Any] = []
        for i, n in enumerate(positions):
            for step in range(STEPS):
                y, states[i] = runner.step(tokens[:, n], states[i], **options)
                if step == 0:
                    first.append(y)
        return [torch.stack(first, 1)]

    return run


def _recomputing(model: Decoder, positions: list[int]) -> Callable[[], list[Tensor]]:
    """Compute everything again for each level."""
    tokens = measure.random_tokens(model, positions[-1] + 1, BATCH)

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [torch.stack([model(tokens[:, : n + 1])[:, -1] for n in positions], 1)]

    return run


def _definition(model: Decoder, levels: int) -> Definition:
    """Return the logits of the first image at the positions."""
    compute = partial(_exact, model, _positions(levels))
    return Definition(compute, ["logits"], rounding_bound(model, levels), compared=lambda x: x[:1])


def _exact(model: Decoder, positions: list[int]) -> list[Tensor]:
    tokens = measure.random_tokens(model, positions[-1] + 1, BATCH)
    return [logits[:, positions] for logits in exact_logits(model, tokens[:1])]


def _remark(levels: int, medians: Mapping[str, float]) -> str:
    """Tell the images per second."""
    speeds = [f"{BATCH / levels / median:.3g} ({name})" for name, median in medians.items()]
    return f"Images per second: {', '.join(speeds)}." if speeds else ""


ABOUT = f"by decoders of the paper's sizes for MNIST and CIFAR-10, {BATCH} images at a time"
CASES = [
    Case("images", f"A level of an image, {ABOUT}.", "levels", tuple(LAYERS), (12, 20), images),
    Case(
        "images-recomputed",
        f"A level of an image by softmax attention that computes everything again for each level, {ABOUT}.",
        "levels",
        tuple(LAYERS),
        (12, 20),
        recomputed,
    ),
]
