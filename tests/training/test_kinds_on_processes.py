"""Every model and mechanism, sharded over two processes, has the losses of one process."""

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
    """The losses of three updates and of an evaluation."""
    data, state = Batches(kind), _steps.begin(model, config, processes)
    model.train()
    found = []
    for _ in range(3):
        found.append(_steps.update(state, data, config, config.lr).loss)
        state.progress.step += 1
    return [*found, evaluate(state.evaluated(), data, config, processes=processes)]


# A large eps, so that gradients which are 0 but for rounding move nothing.
SETTINGS: dict[str, Any] = {"batch_size": 8, "eps": 1e-4}

Jobs = list[tuple[str, dict[str, Any]]]
Losses = list[list[float]]


def without_dropout(name: str) -> tuple[str, Any]:
    kind, fields = CASES[name]
    model = made(kind, fields)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return kind, model


def losses_of_all(rank: int, jobs: Jobs) -> tuple[Losses, Losses]:
    """The losses of each case with its options: alone, of which each process trains every other one, and sharded."""
    alone, sharded = [], []
    for name, options in jobs[rank::2]:
        kind, model = without_dropout(name)
        alone.append(losses_of(model, kind, TrainConfig(**SETTINGS, **options), ALONE))
    with joined() as processes:
        for name, options in jobs:
            kind, model = without_dropout(name)
            config = TrainConfig(**SETTINGS, shard=2, **options)
            sharded.append(losses_of(model, kind, config, processes))
    return alone, sharded


def trained(jobs: Jobs) -> tuple[Losses, list[Losses]]:
    """The losses of each case alone, and on each of the processes that share it."""
    found = results(2, losses_of_all, jobs, seconds=500)
    alone: Losses = [[]] * len(jobs)
    for rank in range(2):
        alone[rank::2] = found[rank][0]
    return alone, [sharded for _, sharded in found]


def check(names: list[str], alone: Losses, sharded: Losses) -> None:
    for name, one, two in zip(names, alone, sharded, strict=True):
        assert one[0] != one[2], name
        assert max(abs(x - y) for x, y in zip(one, two, strict=True)) < 1e-5, (name, one, two)


@pytest.mark.slow
def test_a_few_of_each_form_and_in_bf16():
    in_bf16 = ["hybrid", "encoder_decoder"]
    alone, each = trained([(x, {}) for x in FEW] + [(x, {"bf16": True}) for x in in_bf16])
    few = len(FEW)
    for sharded in each:
        check(FEW, alone[:few], sharded[:few])
        for name, *both in zip(in_bf16, alone[few:], sharded[few:], strict=True):
            truth = alone[FEW.index(name)]
            for losses in both:  # within one rounding to bf16
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


def check_all(names: list[str], options: dict[str, Any]) -> None:
    alone, each = trained([(name, options) for name in names])
    for sharded in each:
        check(names, alone, sharded)


@pytest.mark.scale
def test_every_model_and_mechanism():
    assert len(CASES) > 60
    check_all(list(CASES), {})


@pytest.mark.scale
def test_every_model_with_other_options():
    """Gradients are added up, averaged and used alike for every mechanism, so that each form of model is enough."""
    forms = dict.fromkeys([*(name for name, (kind, _) in CASES.items() if name == kind), *FEW])
    assert len(forms) > 20
    check_all(list(forms), {"accumulate": 3, "ema": 0.9, "optimizer": "radam"})


@pytest.mark.scale
def test_every_stack_recomputed():
    stacks = [name for name, (kind, _) in CASES.items() if kind in ("decoder", "encoder_decoder")]
    check_all(stacks, {"gradient_checkpointing": True})
