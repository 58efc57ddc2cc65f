"""The share of the processor's speed: operations as torch counts them, and what the log says."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from unrolled import data
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.training import TrainConfig, dry_run, read_log, train, utilisation
from unrolled.training.utilisation import flops_per_token, speed_of_products

from .standin import Cycles, run

SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 2}
SHORT = TrainConfig(steps=4, batch_size=4, log_every=2, eval_batches=1, threads=1)


def decoder(vocab_size: int, **options: object) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=vocab_size, **SIZES, **options))


@pytest.mark.parametrize("head", ["categorical", "tied", "mixture"])
def test_operations_are_those_that_torch_counts(head):
    options = {
        "categorical": {"positions": "learned"},
        "tied": {"tie_embeddings": True, "positions": "rotary"},
        "mixture": {"head": "logistic_mixture"},
    }[head]
    model = decoder(11, **options)
    ids = torch.arange(24).reshape(2, 12) % 11
    with FlopCounterMode(display=False) as counter:
        model.loss(ids, ids).backward()
    products = sum(n for name, n in counter.get_flop_counts()["Global"].items() if name.__name__ != "bmm")
    assert flops_per_token(model) * ids.numel() == products


def test_the_log_and_a_dry_run_tell_the_share(tmp_path):
    digits = data.load("digits")  # every token read is a target
    model = decoder(digits.vocab_size, start_token=True)
    train(model, digits, SHORT, tmp_path)
    lines = [x for x in read_log(tmp_path / "log.jsonl") if x["event"] == "train"]
    torch.set_num_threads(1)
    per_second = speed_of_products(torch.device("cpu"), bf16=False)
    for line in lines:
        flops = line["tokens_per_second"] * flops_per_token(model)
        assert line["mfu"] == pytest.approx(flops / per_second)
    forecast = dry_run(model, digits, SHORT)
    assert forecast.mfu is not None
    assert 0 < forecast.mfu < 1


def test_the_speed_is_that_of_the_tokens_that_are_read(tmp_path):
    copies = data.load("copy", length=16, val_size=4)  # at most half of the tokens are targets
    model = decoder(copies.vocab_size)
    train(model, copies, SHORT, tmp_path)
    torch.set_num_threads(1)
    per_second = speed_of_products(torch.device("cpu"), bf16=False)
    for line in (x for x in read_log(tmp_path / "log.jsonl") if x["event"] == "train"):
        flops = line["tokens_per_second"] * flops_per_token(model)
        assert line["mfu"] == pytest.approx(flops / per_second)
    assert dry_run(model, copies, SHORT).tokens == 4 * 16


def test_translations_have_no_share(tmp_path):
    class Translations(Cycles):
        """Sources and targets of equal lengths, which are no inputs with a target each."""

        task = "translation"

    run(tmp_path, data=Translations(), log_every=1)
    assert not any("mfu" in x for x in read_log(tmp_path / "log.jsonl"))


def test_labels_have_no_share(tmp_path):
    expressions = data.load("listops", shortest=10, length=60, val_size=4)
    model = Encoder(
        EncoderConfig(vocab_size=expressions.vocab_size, n_classes=expressions.n_classes, **SIZES)
    )
    train(model, expressions, SHORT, tmp_path)
    assert not any("mfu" in x for x in read_log(tmp_path / "log.jsonl"))
    assert dry_run(model, expressions, SHORT).mfu is None


def test_bf16_is_measured_by_itself():
    speeds = [speed_of_products(torch.device("cpu"), bf16=bf16) for bf16 in (False, True)]
    assert speeds[0] != speeds[1]
    assert all(10**8 < speed < 10**14 for speed in speeds)


def test_the_speed_is_that_of_the_fastest_product(monkeypatch):
    ticks = iter([0, 5, 10, 12, 20, 24, 30, 33, 40, 44])  # the second takes 2 s
    monkeypatch.setattr(utilisation, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(utilisation, "SIZE", {"cpu": 8})
    speed = utilisation._speed.__wrapped__(torch.device("cpu"), torch.float32, 1)
    assert speed == 2 * 8**3 / 2
