"""Training by segments gives the gradient of the whole sequence."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import attention
from unrolled.contract import IGNORED, Batch, UnsupportedError
from unrolled.models import (
    Decoder,
    DecoderConfig,
    PerceiverAR,
    PerceiverARConfig,
    RecurrentLM,
    RecurrentLMConfig,
)
from unrolled.ops.state import leaves
from unrolled.training import TrainConfig, _kept_states, evaluate, train
from unrolled.training._kept_states import KeptStates
from unrolled.training.gradients import add_gradient
from unrolled.training.segments import Segments, pieces

from .standin import config, run

LEVELS = 11
CPU = torch.device("cpu")
RECURRENT = [
    name
    for name in attention.names()
    if (supports := attention.load(name).supports).causal and supports.recurrence != "none"
]
HYBRID = {
    "attention": ["linear", "window"],
    "attention_options": {"linear": {"conv": 4, "rotary": False}, "window": {"window": 6}},
    "positions": "rotary",
}


def decoder(**options) -> Decoder:
    torch.manual_seed(0)
    options = {"d_model": 16, "n_layers": 2, "n_heads": 2, "positions": "none"} | options
    return Decoder(DecoderConfig(LEVELS, **options)).double()


def rows(length: int, count: int = 2) -> Batch:
    """Rows with some targets that are ignored."""
    g = torch.Generator().manual_seed(length)
    ids = torch.randint(LEVELS, (count, length + 1), generator=g)
    ignored = torch.rand(count, length, generator=g) < 0.2
    return Batch(ids[:, :-1], ids[:, 1:].masked_fill(ignored, IGNORED))


def gradients(model, batch: Batch, segment: int | None, **settings) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradient of every parameter."""
    model.zero_grad()
    loss, _ = add_gradient(model, batch, 0.7, TrainConfig(segment=segment, **settings), CPU)
    return loss.item(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def check_equal(model, batch: Batch, segment: int) -> None:
    """By segments, the loss and the gradient are those of the whole."""
    loss, whole = gradients(model, batch, None)
    whole = {name: x.clone() for name, x in whole.items()}
    found, parts = gradients(model, batch, segment)
    assert abs(found - loss) < 1e-14
    assert parts.keys() == whole.keys()
    scale = max(x.abs().max() for x in whole.values())
    for name, x in whole.items():
        assert (parts[name] - x).abs().max() < 1e-12 * scale, name


@pytest.mark.parametrize("name", RECURRENT)
def test_the_gradient_of_every_mechanism_is_that_of_the_whole_sequence(name):
    model = decoder(attention=name)
    check_equal(model, rows(37), 10)
    check_equal(model, rows(37, 1), 10)


@pytest.mark.parametrize("cell", ["lstm", "kronecker", "linear_attention"])
def test_so_is_that_of_cells(cell):
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentLMConfig(LEVELS, cell=cell, d_model=8, n_layers=2)).double()
    check_equal(model, rows(23), 7)


@pytest.mark.slow
@settings(max_examples=25)
@given(length=st.integers(1, 40), segment=st.integers(1, 45), padded=st.booleans(), data=st.data())
def test_rows_of_any_length_in_segments_of_any_length(length, segment, padded, data):
    batch = rows(length)
    if padded:
        padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length)))
        padding = padding.view(2, length)
        padding[0, 0] = False
        targets = batch.targets.masked_fill(padding, IGNORED)
        targets[0, 0] = 1
        batch = Batch(batch.inputs, targets, padding)
    else:
        batch.targets[0, 0] = 1
    check_equal(decoder(**HYBRID), batch, segment)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 15), min_size=2, max_size=8), st.integers(1, 20))
def test_packed_sequences_do_not_mix(lengths, segment):
    ids = torch.randint(LEVELS, (1, sum(lengths) + 1), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    check_equal(decoder(**HYBRID), Batch(ids[:, :-1], ids[:, 1:], cu_seqlens=bounds), segment)


def chained(model, batch: Batch, length: int) -> dict[str, torch.Tensor]:
    """The gradient through one graph over all segments, one after the other."""
    model.zero_grad()
    state, total = model.init_state(len(batch.inputs)), 0.0
    for start in range(0, batch.inputs.shape[1], length):
        part = slice(start, start + length)
        inputs, targets = batch.inputs[:, part], batch.targets[:, part]
        loss, state = model.loss_from(inputs, targets, state)
        total += loss * (targets != IGNORED).sum()
    (0.7 * total / (batch.targets != IGNORED).sum()).backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


def test_the_state_at_the_end_is_that_of_a_reading_and_has_no_graph():
    model, batch = decoder(attention="linear"), rows(11)
    found = Segments(model, batch, 4)
    _, end = found.add_gradient(1.0, found.start())
    with torch.no_grad():
        _, expected = model.prefill(batch.inputs, model.init_state(2))
    assert not any(x.requires_grad for x in leaves(end).values())
    for x, y in zip(leaves(end).values(), leaves(expected).values(), strict=True):
        torch.testing.assert_close(x, y)


def test_a_target_at_padding_counts_neither_in_the_loss_nor_in_the_gradient():
    batch = rows(11)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[0, :3] = padding[1, 6:] = True
    model, found = decoder(attention="linear"), []
    for targets in (batch.targets, batch.targets.masked_fill(padding, IGNORED)):
        model.zero_grad()
        segments = Segments(model, batch._replace(targets=targets, key_padding_mask=padding), 4)
        loss, _ = segments.add_gradient(1.0, segments.start())
        found.append([loss, segments.loss(segments.start()), *(x.grad.clone() for x in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_same_when_a_segment_is_computed_again(recompute):
    model, batch = decoder(**HYBRID, dropout=0.3), rows(37)
    model.gradient_checkpointing = recompute
    torch.manual_seed(5)
    expected, after = chained(model, batch, 10), torch.rand(3)
    torch.manual_seed(5)
    _, found = gradients(model, batch, 10)
    assert torch.equal(torch.rand(3), after)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=1e-15)
    _, other = gradients(model, batch, 10)
    assert not torch.allclose(other["embedding.weight"], expected["embedding.weight"])


def test_under_autocast_too():
    model, batch = decoder(**HYBRID).float(), rows(37)
    with torch.autocast("cpu", torch.bfloat16):
        expected = chained(model, batch, 10)
    _, found = gradients(model, batch, 10, bf16=True)
    for name, x in expected.items():  # only sums in another order
        torch.testing.assert_close(found[name], x, rtol=0, atol=4 * 2**-8 * x.abs().max().item())


class Rows:
    """The same rows in every batch."""

    def batch(self, split, *, step, batch_size, seed):
        return rows(37, batch_size)

    def eval_batches(self, batch_size):
        yield rows(41, batch_size)
        yield rows(9, 1)


def test_a_run_by_segments_is_the_run_without(tmp_path):
    shared = config(steps=6, accumulate=2, batch_size=3)
    whole, parts = decoder(**HYBRID), decoder(**HYBRID)
    result = train(whole, Rows(), shared, tmp_path / "whole", progress=False)
    found = train(parts, Rows(), replace(shared, segment=10), tmp_path / "parts", progress=False)
    assert abs(result.best_val - found.best_val) < 1e-12
    for x, y in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)  # AdamW divides by small gradients
    # `segment` may change when a run is resumed
    found = train(parts, Rows(), replace(shared, segment=4), tmp_path / "parts", progress=False)
    assert found.steps == 6


def test_an_evaluation_by_segments_is_the_one_without():
    model = decoder(**HYBRID)
    whole, parts = (evaluate(model, Rows(), TrainConfig(segment=s, batch_size=3)) for s in (None, 10))
    assert abs(whole - parts) < 1e-14


def test_models_without_a_state_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        UnsupportedError, match=r"StandIn has no state to continue from: use segment=None, carry_state=False"
    ):
        run(tmp_path / "a", segment=8)
    model = PerceiverAR(
        PerceiverARConfig(LEVELS, d_model=16, n_layers=2, n_heads=2, max_length=64, n_latents=4)
    )
    with pytest.raises(UnsupportedError, match=r"PerceiverAR .* no loss_from"):
        train(model, Rows(), config(segment=8), tmp_path / "b", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("in_memory", [1, 2**20])
def test_states_come_back_in_the_opposite_order(monkeypatch, in_memory):
    monkeypatch.setattr(_kept_states, "IN_MEMORY", in_memory)
    model, states, kept = decoder(**HYBRID), [], KeptStates()
    state = model.init_state(2)
    for _ in range(4):
        _, state = model.prefill(torch.ones(2, 3, dtype=torch.long), state)
        states.append(state)
        kept.push(state)
    for expected in reversed(states):
        found = leaves(kept.pop(state))
        assert found.keys() == leaves(expected).keys()
        for name, x in leaves(expected).items():
            assert torch.equal(found[name], x)
            assert found[name].dtype == x.dtype
    kept.close()


def test_short_sequences_are_read_together_as_long_as_they_fit():
    bounds = torch.tensor([0, 3, 8, 10, 25, 27, 30], dtype=torch.int32)
    ids = torch.arange(30).view(1, -1)
    found = list(pieces(Batch(ids, ids, cu_seqlens=bounds), 10))
    assert [x.inputs.shape[1] for x in found] == [10, 15, 5]
    assert [None if x.cu_seqlens is None else x.cu_seqlens.tolist() for x in found] == [
        [0, 3, 8, 10], None, [0, 2, 5],
    ]  # fmt: skip
