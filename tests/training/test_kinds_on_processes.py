"""Every model and mechanism, sharded over two processes, has the losses of one process."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from unrolled.contract import Batch
from unrolled.models import Decoder, DecoderConfig
from unrolled.training import TrainConfig, TrainResult, _steps, evaluate, train
from unrolled.training.processes import ALONE, Processes, joined

from .kinds import VOCAB, Batches, cases, made
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


class LongThenShort:
    """Packed documents, which are long in the first update only."""

    def batch(self, split: str, *, step: int, batch_size: int, seed: int) -> Batch:
        ids = torch.randint(VOCAB, (batch_size, 33), generator=torch.Generator().manual_seed(step))
        bounds = torch.arange(0, batch_size * 32 + 1, 4 if step else 32, dtype=torch.int32)
        return Batch(ids[:, :-1], ids[:, 1:], cu_seqlens=bounds)

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        yield self.batch("val", step=0, batch_size=batch_size, seed=0)


def trained_on_both(rank: int, folder: str) -> TrainResult:
    model = Decoder(DecoderConfig(VOCAB, d_model=16, n_layers=1, n_heads=2, attention="long_short"))
    return train(model, LongThenShort(), TrainConfig(batch_size=4, steps=3), folder, progress=False)


def test_parameters_that_only_some_batches_use(tmp_path):
    for found in results(2, trained_on_both, str(tmp_path)):
        assert found.steps == 3


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
