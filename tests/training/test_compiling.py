"""Training with compiled blocks: the same losses and weights as without, and what cannot be compiled."""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from unrolled import data, models
from unrolled.contract import UnsupportedError
from unrolled.training import TrainConfig, dry_run, train
from unrolled.training.compiling import compiled

from .many import results
from .standin import StandIn, config

SIZE = {"d_model": 16, "n_layers": 3, "n_heads": 2}


def decoder(**options):
    torch.manual_seed(0)
    return models.Decoder(models.DecoderConfig(vocab_size=DATA.vocab_size, **SIZE, **options)).double()


DATA = data.load("copy", length=6, val_size=5)


def weights_after(folder, model, **settings):
    settings = {"steps": 4, "batch_size": 4, "lr": 1e-2, "warmup_steps": 1, "eval_every": 2} | settings
    result = train(model, DATA, TrainConfig(**settings), folder, progress=False)
    return result.best_val, {name: x.detach().clone() for name, x in model.named_parameters()}


@pytest.mark.compilers
@pytest.mark.parametrize(
    "settings", [{}, {"accumulate": 2, "ema": 0.9}, {"gradient_checkpointing": True}], ids=str
)
def test_the_weights_are_those_without(tmp_path, settings):
    torch.compiler.reset()
    counters.clear()
    loss, weights = weights_after(tmp_path / "compiled", decoder(), compile=True, **settings)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    plain_loss, plain = weights_after(tmp_path / "plain", decoder(), **settings)
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    for name, x in weights.items():
        torch.testing.assert_close(x, plain[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.compilers
def test_blocks_that_are_alike_are_compiled_once():
    torch.compiler.reset()
    model, batch = (
        decoder(attention=["linear", "softmax", "linear"]),
        DATA.batch("train", step=0, batch_size=2, seed=0),
    )
    with compiled(model):
        counters.clear()
        model.loss(batch.inputs, batch.targets)
        assert counters["stats"]["unique_graphs"] == 2
        assert not counters["graph_break"]


@pytest.mark.compilers
def test_a_run_can_go_on_compiled_and_end_without(tmp_path):
    model = decoder()
    weights_after(tmp_path, model, steps=2, schedule="constant")
    _, weights = weights_after(tmp_path, model, schedule="constant", compile=True)
    _, whole = weights_after(tmp_path / "whole", decoder(), schedule="constant")
    for name, x in weights.items():
        torch.testing.assert_close(x, whole[name], rtol=0, atol=1e-12, msg=name)
    assert not any(module._compiled_call_impl for module in model.modules())


def on_two(rank, folder, shards):
    """The validation loss of two processes; only the first has it in a folder."""
    warnings.filterwarnings(
        "ignore", "(`torch.jit.script_method` is deprecated|The .grad attribute of a Tensor)"
    )
    return [weights_after(folder / str(x), decoder(), compile=True, shard=x)[0] for x in shards]


@pytest.mark.compilers
def test_two_processes_compile_copies_and_shards(tmp_path):
    expected, _ = weights_after(tmp_path / "one", decoder())
    for found in results(2, on_two, tmp_path, [1, 2], seconds=300):
        assert found == pytest.approx([expected] * 2, rel=1e-10)


@pytest.mark.compilers
def test_a_dry_run_compiles_too():
    found = dry_run(decoder(), DATA, TrainConfig(steps=4, batch_size=4, compile=True))
    assert found.measured == 4


def test_what_has_no_blocks_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="StandIn has no blocks to compile: use compile=False"):
        train(StandIn(), DATA, config(compile=True), tmp_path, progress=False)


def test_reversible_blocks_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="reversible blocks of Decoder cannot be compiled"):
        weights_after(tmp_path, decoder(reversible=True), compile=True)


def test_without_a_compiler_it_is_refused_in_one_sentence(tmp_path, monkeypatch):
    def missing(function):
        def call(x):
            raise RuntimeError("no C++ compiler\nand much more")

        return call

    monkeypatch.setattr(torch, "compile", missing)
    with pytest.raises(UnsupportedError, match=r"not work here \(no C\+\+ compiler\): use compile=False"):
        weights_after(tmp_path / "run", decoder(), compile=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("other", [{"segment": 4}, {"carry_state": True}, {"sequence": 2}], ids=str)
def test_parts_of_sequences_are_not_compiled(other):
    with pytest.raises(ValueError, match="compile is True, but must be False with segment"):
        TrainConfig(compile=True, **other)
