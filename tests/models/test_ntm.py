import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from unrolled import data
from unrolled.cli import run_config
from unrolled.contract import IGNORED, UnsupportedError
from unrolled.models import NTMModel, NTMModelConfig, NTMNumbers

SMALL = {"controller_size": 6, "memory_size": 5, "memory_width": 4}


def small(kind=NTMModel, **changed):
    torch.manual_seed(0)
    settings = {"input_size": 10, "output_size": 8, "cell_options": SMALL, "hidden_size": 6} | changed
    return kind(NTMModelConfig(**settings))


def test_the_loss_is_the_mean_over_the_bits_that_count():
    model = small()
    batch = data.load("copy_bits", max_length=4, val_size=5).batch("val", step=0, batch_size=5, seed=0)
    counted = batch.targets != IGNORED
    assert 0 < counted.sum() < counted.numel()
    logits = model(batch.inputs)
    expected = F.binary_cross_entropy(logits[counted].sigmoid(), batch.targets[counted])
    torch.testing.assert_close(model.loss(batch.inputs, batch.targets), expected)
    nothing = torch.full_like(batch.targets, IGNORED)
    assert model.loss(batch.inputs, nothing) == 0


def test_targets_at_padding_do_not_count():
    model = small(output_size=2)
    x, targets = torch.randn(2, 4, 10), torch.ones(2, 4, 2)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    ignored = targets.masked_fill(padding.unsqueeze(-1), IGNORED)
    found = model.loss(x, targets, key_padding_mask=padding)
    assert torch.equal(found, model.loss(x, ignored, key_padding_mask=padding))
    unset = targets.masked_fill(padding.unsqueeze(-1), torch.nan)
    assert torch.equal(found, model.loss(x, unset, key_padding_mask=padding))
    assert not torch.equal(found, model.loss(x, targets))


@pytest.mark.parametrize("value", [7.0, -1.0, torch.nan])
def test_targets_that_are_no_bits_are_refused(value):
    model, targets = small(output_size=2), torch.ones(2, 4, 2)
    targets[1, 2, 0] = value
    with pytest.raises(ValueError, match="targets holds other values than probabilities and -100"):
        model.loss(torch.randn(2, 4, 10), targets)


def test_wrong_bits_are_counted_for_each_row():
    model = small(output_size=2)
    x = torch.randn(3, 4, 10)
    targets = (model(x) > 0).float()
    targets[0, 1, 0] = 1 - targets[0, 1, 0]
    targets[2, :, 1] = 1 - targets[2, :, 1]
    targets[2, 0] = IGNORED
    assert model.wrong_bits(x, targets).tolist() == [1, 0, 3]
    with pytest.raises(ValueError, match=r"targets is .* must be floating point \[3, 4, 2\]"):
        model.wrong_bits(x, targets[0, 0])


def test_numbers_are_read_after_the_last_step_that_is_no_padding():
    model = small(NTMNumbers, output_size=1)
    x = torch.randn(3, 6, 10)
    padding = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [1, 1, 0, 1, 0, 1]]).bool()
    found = model(x, key_padding_mask=padding)
    assert found.shape == (3, 1)
    for row in range(3):
        torch.testing.assert_close(found[row], model(x[row][~padding[row]][None])[0])
    targets = torch.randn(3)
    expected = (found[:, 0] - targets).square().mean()
    torch.testing.assert_close(model.loss(x, targets, key_padding_mask=padding), expected)


def test_only_a_turing_machine_can_be_traced():
    assert small().trace(torch.randn(2, 3, 10)).read.shape == (2, 3, 1, 5)
    with pytest.raises(UnsupportedError, match="the cell 'rnn' has no heads to trace; use cell='ntm'"):
        small(cell="rnn", cell_options={}).trace(torch.randn(2, 3, 10))


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [("copy_bits", NTMModel, (10, 8)), ("repeat_copy", NTMModel, (10, 9)), ("adding", NTMNumbers, (2, 1))],
)
def test_a_run_takes_the_sizes_from_the_data(name, kind, sizes):
    run = run_config.resolve(run_config.read(None, [f"data.name={name}", "data.val_size=2", "run_dir=x"]))
    assert (run.kind, run.model.input_size, run.model.output_size) == (kind, *sizes)
    model, batch = run.kind(run.model), run.dataset.batch("train", step=0, batch_size=2, seed=0)
    model.loss(
        batch.inputs[:, :3], batch.targets[:, :3] if batch.targets.dim() > 1 else batch.targets
    ).backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: small(cell_options={"heads": 3}), "cell_options of 'ntm' do not fit: .*heads"),
        (
            lambda x: small().loss(x, torch.zeros(2, 3, 7)),
            r"targets is torch.float32 of shape \[2, 3, 7\], but must be",
        ),
        (
            lambda x: small().loss(x, torch.zeros(2, 3, 8).long()),
            r"targets is torch.int64 of shape \[2, 3, 8\], but must",
        ),
        (lambda x: small(NTMNumbers)(x[:, :0]), "must have at least one step"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 3, 10))


def test_no_rows_cost_nothing():
    x = torch.zeros(0, 3, 10)
    assert small().loss(x, torch.zeros(0, 3, 8)) == 0
    assert small(NTMNumbers, output_size=1).loss(x, torch.zeros(0)) == 0
