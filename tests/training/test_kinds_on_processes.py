"""Every model and mechanism, sharded over two processes, has the losses of one process."""

import copy
from typing import Any

import pytest
from torch import nn

from unrolled.training import TrainConfig, _steps, evaluate
from unrolled.training.processes import ALONE, Processes, joined

from .kinds import Batches, cases, made
from .many import results

CASES = {name: (kind, fields) for name, kind, fields in cases()}
FEW = [
    "hybrid",
    "reversible",
    "linformer layerwise",
    "perceiver_ar",
    "encoder_decoder",
    "ntm",
    "recurrent_lm of kronecker",
]


def losses_of(model: Any, kind: str, config: TrainConfig, processes: Processes) -> list[float]:
    """The losses of four updates and of an evaluation."""
    data, state = Batches(kind), _steps.begin(model, config, processes)
    model.train()
    found = []
    for _ in range(4):
        found.append(_steps.update(state, data, config, config.lr).loss)
        state.progress.step += 1
    return [*found, evaluate(state.evaluated(), data, config, processes=processes)]


Pairs = list[tuple[list[float], list[float]]]


def compare(rank: int, jobs: list[tuple[str, dict[str, Any]]]) -> Pairs:
    """The losses of each case with its options, on one process and sharded."""
    found = []
    with joined() as processes:
        for name, options in jobs:
            kind, fields = CASES[name]
            model = made(kind, fields)
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            # a large eps, so that gradients which are 0 but for rounding move nothing
            one = TrainConfig(batch_size=8, eps=1e-4, **options)
            many = TrainConfig(batch_size=8, eps=1e-4, shard=2, **options)
            alone = losses_of(copy.deepcopy(model), kind, one, ALONE)
            found.append((alone, losses_of(model, kind, many, processes)))
    return found


def check(names: list[str], found: Pairs) -> None:
    for name, (alone, sharded) in zip(names, found, strict=True):
        assert alone[0] != alone[3], name
        assert max(abs(x - y) for x, y in zip(alone, sharded, strict=True)) < 1e-5, (name, alone, sharded)


def test_a_few_of_each_form_and_in_bf16():
    in_bf16 = ["hybrid", "encoder_decoder"]
    for found in results(2, compare, [(x, {}) for x in FEW] + [(x, {"bf16": True}) for x in in_bf16]):
        exact, rounded = found[: len(FEW)], found[len(FEW) :]
        check(FEW, exact)
        for name, (alone, sharded) in zip(in_bf16, rounded, strict=True):
            truth = exact[FEW.index(name)][0]
            for losses in (alone, sharded):  # within one rounding to bf16
                off = max(abs(x - y) for x, y in zip(losses, truth, strict=True))
                assert 1e-5 < off < 2**-9 * min(truth), (name, losses, truth)


@pytest.mark.scale
@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "ema": 0.9, "optimizer": "radam"}], ids=str)
def test_every_model_and_mechanism(options):
    assert len(CASES) > 60
    check_all(list(CASES), options)


@pytest.mark.scale
def test_every_stack_recomputed():
    stacks = [name for name, (kind, _) in CASES.items() if kind in ("decoder", "encoder_decoder")]
    check_all(stacks, {"gradient_checkpointing": True})


def check_all(names: list[str], options: dict[str, Any]) -> None:
    for found in results(2, compare, [(name, options) for name in names], seconds=500):
        check(names, found)
