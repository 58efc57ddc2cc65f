"""The cost of a token in a decoder by position: measured time and counted bytes."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unrolled.contract import UnsupportedError
from unrolled.decode import Plan, plan
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import nbytes
from unrolled.threads import cpu_threads
from unrolled.training.memory import PeakBytes

Key = TypeVar("Key")

WINDOW = 64  # tokens per timing of a stepping decoder, so that work not done at every token is included


class Cost(NamedTuple):
    """What a token costs after `position` others: seconds (a median), and bytes."""

    position: int
    seconds: float
    nbytes: int


class Task(NamedTuple):
    """A decoder at some position: `run` generates `tokens` tokens; `nbytes` is the memory that this needs."""

    run: Callable[[], object]
    tokens: int
    nbytes: int


Contender = Callable[[int], Task]
"""A way to decode: maps a position to the task of continuing from there."""


def linear_and_softmax(
    shape: Mapping[str, Any],
    positions: Sequence[int],
    *,
    recompute_positions: Sequence[int],
    repeats: int = 5,
    on_run: Callable[[], object] = lambda: None,
) -> dict[str, list[Cost]]:
    """Measure linear attention, softmax with a cache and softmax without one, for untrained decoders.

    All of them run on one thread.

    Args:
        shape: fields of `DecoderConfig`, the same for all; its `positions` must not be learned.
        positions: where to measure "linear" and "softmax_cache".
        recompute_positions: where to measure "softmax_recompute".
        repeats: as for `cost_per_token`.
        on_run: as for `cost_per_token`.
    """
    linear, softmax = (Decoder(DecoderConfig(attention=a, **shape)).eval() for a in ("linear", "softmax"))
    contenders = {
        "linear": (stepping(linear), positions),
        "softmax_cache": (stepping(softmax), positions),
        "softmax_recompute": (recomputing(softmax), recompute_positions),
    }
    return cost_per_token(contenders, repeats=repeats, on_run=on_run)


def stepping(model: Any, begin: Callable[[], Any] | None = None) -> Contender:
    """Decode one sequence as a recurrence; every repeat starts from the same state, whose bytes are counted.

    Args:
        model: a model with `init_state`, `prefill` and `step`. A plan runs it if possible.
        begin: returns the model's state before the first token; the model itself then runs, without a plan.
            By default, the state is `init_state(1)`.
    """
    runner = model if begin else planned(model)
    # By default, a step of a plan copies the state, which a loop that needs each state once can avoid.
    options = {"in_place": True} if isinstance(runner, Plan) else {}

    def prepare(position: int) -> Task:
        tokens = random_tokens(model, position + WINDOW)
        _, start = runner.prefill(tokens[:, :position], begin() if begin else runner.init_state(1))
        again = repeatable(runner, start, WINDOW)

        def run() -> Any:
            state = again()
            for token in tokens[:, position:].unbind(1):
                logits, state = runner.step(token, state, **options)
            return logits

        return Task(run, WINDOW, nbytes(start))

    return prepare


def repeatable(runner: Any, start: Any, tokens: int) -> Callable[[], Any]:
    """Return a function that returns the state `start` in every call, to read up to `tokens` more tokens.

    A plan that reads in place writes to its cache only behind what was read before. So the cache gets room
    once, and each call copies only the rest of the state: the clock does not count the copy of a cache.
    """
    if not isinstance(runner, Plan):
        return lambda: start
    roomy = runner.resized(start, int(start.position.max()) + tokens)
    return lambda: roomy._replace(position=roomy.position.clone(), fixed=roomy.fixed.clone())


def planned(model: Any) -> Any:
    """Return a plan of the model, or the model itself if a plan cannot run it."""
    try:
        return plan(model)
    except UnsupportedError:
        return model


def recomputing(model: Decoder) -> Contender:
    """Decode one sequence by recomputing the prefix for each token; the bytes are the peak of activations."""

    def prepare(position: int) -> Task:
        tokens = random_tokens(model, position)
        with PeakBytes() as memory:
            model(tokens)
        return Task(lambda: model(tokens), 1, memory.peak)

    return prepare


def cost_per_token(
    contenders: Mapping[str, tuple[Contender, Sequence[int]]],
    *,
    repeats: int = 5,
    on_run: Callable[[], object] = lambda: None,
) -> dict[str, list[Cost]]:
    """Measure each contender at each of its positions, on one thread.

    Every repeat visits all contenders at all positions in turn, so that temporary load on the machine affects
    all of them alike, and the median over the repeats discards it.

    Args:
        contenders: for each name, a way to decode and the positions to measure it at.
        repeats: timings per contender and position.
        on_run: called after each timing.

    Returns:
        for each name, a cost per position.
    """
    with torch.inference_mode(), cpu_threads(1):
        tasks = {
            (name, position): prepare(position)
            for name, (prepare, positions) in contenders.items()
            for position in positions
        }
        runs = {key: task.run for key, task in tasks.items()}
        seconds = take_turns(runs, least=repeats, budget=0, on_run=on_run)

    def cost(name: str, position: int) -> Cost:
        task = tasks[name, position]
        return Cost(position, median(seconds[name, position]) / task.tokens, task.nbytes)

    return {name: [cost(name, p) for p in positions] for name, (_, positions) in contenders.items()}


def take_turns(
    runs: Mapping[Key, Callable[[], object]],
    *,
    least: int,
    budget: float,
    on_run: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Time `runs` interleaved, so that load on the machine affects all of them alike.

    The garbage collector is disabled during the measurement.

    Args:
        runs: what to time, by any key.
        least: rounds in which all take part.
        budget: seconds, shared equally: after `least` rounds, each is timed until its share is spent.
        on_run: called after each timing.

    Returns:
        for each key, the seconds of every run.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    collecting = gc.isenabled()
    gc.disable()
    try:
        while waiting := [
            key
            for key, taken in seconds.items()
            if len(taken) < least or sum(taken) + min(taken) < budget / len(runs)
        ]:
            for key in waiting:
                began = time.perf_counter()
                runs[key]()
                seconds[key].append(time.perf_counter() - began)
                on_run()
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    return seconds


def random_tokens(model: Any, length: int, batch: int = 1) -> Tensor:
    """Draw tokens `[batch, length]` for a model, the same ones every time, on its device."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    return tokens.to(next(model.parameters()).device)
