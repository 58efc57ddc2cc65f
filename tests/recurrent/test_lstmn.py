import pytest
import torch
from agreement import assert_same_gradients, normal
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unrolled.ops.state import select
from unrolled.recurrent.lstmn import LSTMN, DeepFusionLSTMN, tapes
from unrolled.testing import CellMaker, check_half_precision


def as_written(layer: LSTMN, x: torch.Tensor, tape_length: int | None = None) -> torch.Tensor:
    """The equations for one row, entry by entry."""
    N = layer.hidden_size
    V, W_x = layer.input_proj.weight.split([4 * N, layer.score_size])
    b, b_score = layer.input_proj.bias.split([4 * N, layer.score_size])
    tape = [(x.new_zeros(N), x.new_zeros(N))]
    attended, outputs = x.new_zeros(N), []
    for x_t in x:
        query = W_x @ x_t + b_score + layer.attended_proj @ attended
        scores = [layer.score @ torch.tanh(layer.key_proj @ h + query) for h, _ in tape]
        s = torch.stack(scores).exp()
        s = s / s.sum()
        attended = sum(weight * h for weight, (h, _) in zip(s, tape, strict=True))
        memory = sum(weight * c for weight, (_, c) in zip(s, tape, strict=True))
        i, f, g, o = (layer.recurrent @ attended + V @ x_t + b).chunk(4)
        c = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        tape.append((h, c))
        tape = tape if tape_length is None else tape[-tape_length:]
        outputs.append(h)
    return torch.stack(outputs)


@settings(max_examples=10)
@given(length=st.integers(1, 8), hidden=st.integers(1, 5), score=st.integers(1, 4), bound=st.integers(0, 4))
def test_it_is_its_equations(length, hidden, score, bound):
    layer = LSTMN(3, hidden, score_size=score, tape_length=bound or None).double()
    for parameter in layer.parameters():
        parameter.data.mul_(3)
    x = normal(2, length, 3).requires_grad_()
    found = layer(x)
    expected = torch.stack([as_written(layer, row, bound or None) for row in x])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert_same_gradients(found, expected, [x, *layer.parameters()], rtol=0)


def test_a_tape_of_length_1_is_the_lstm_of_torch():
    ours, theirs = LSTMN(3, 5, tape_length=1).double(), nn.LSTM(3, 5, batch_first=True).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input_proj.weight[:20])
        theirs.weight_hh_l0.copy_(ours.recurrent)
        theirs.bias_ih_l0.copy_(ours.input_proj.bias[:20])
        theirs.bias_hh_l0.zero_()
    x = normal(2, 40, 3)
    torch.testing.assert_close(ours(x), theirs(x)[0], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_bounded_tape_keeps_the_contract():
    make = CellMaker(LSTMN, {"tape_length": 3})
    assert make.supports.recurrence == "constant"
    check_uncompiled(make, check_half_precision)  # slow, and the same code as without a bound


def test_without_autograd_the_tape_grows_by_one_entry_a_token():
    layer = LSTMN(3, 4)
    with torch.no_grad():
        _, state = layer.prefill(torch.randn(2, 6, 3), layer.init_state(2))
        _, after = layer.step(torch.randn(2, 3), state)
    assert [state.tape.shape, after.tape.shape] == [(2, 7, 8), (2, 8, 8)]
    assert after.filled.all()


@torch.no_grad()
def test_it_can_be_vectorised_without_autograd():
    layer, x = LSTMN(3, 4), torch.randn(3, 2, 5, 3)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x.flatten(0, 1)).unflatten(0, (3, 2)))


@pytest.mark.parametrize("name", ["score_size", "tape_length"])
def test_impossible_sizes_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0, but must be a whole number of at least 1, or None"):
        LSTMN(3, 4, **{name: 0})


def fusing(tape_length: int | None = None) -> DeepFusionLSTMN:
    torch.manual_seed(1)
    return DeepFusionLSTMN(3, 4, score_size=5, tape_length=tape_length).double()


def test_deep_fusion_is_its_equations():
    layer = fusing(tape_length=1)
    hidden, memory, x = normal(2, 6, 4, seed=1), normal(2, 6, 4, seed=2), normal(2, 5, 3)
    found, weights, _ = layer.prefill(x, layer.init_state(hidden, memory))
    W, b = layer.input_proj.weight, layer.input_proj.bias
    V, b_gates = layer.cell.input_proj.weight[:16], layer.cell.input_proj.bias[:16]
    for row in range(2):
        h = c = read = torch.zeros(4, dtype=torch.float64)
        for t, x_t in enumerate(x[row]):
            query = W[4:] @ x_t + b[4:] + layer.read_proj @ read
            scores = [layer.score @ torch.tanh(layer.key_proj @ gamma + query) for gamma in hidden[row]]
            p = torch.stack(scores).softmax(0)
            read, found_memory = p @ hidden[row], p @ memory[row]
            r = torch.sigmoid(W[:4] @ x_t + b[:4] + layer.recurrent @ read)
            i, f, g, o = (V @ x_t + b_gates + layer.cell.recurrent @ h).chunk(4)
            c = r * found_memory + torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            torch.testing.assert_close(found[row, t], h, rtol=0, atol=1e-12)
            torch.testing.assert_close(weights[row, t], p, rtol=0, atol=1e-12)


def test_deep_fusion_reads_no_padding_whatever_it_holds():
    encoder, layer = LSTMN(3, 4).double(), fusing()
    source, x = normal(3, 5, 3, seed=3), normal(3, 4, 3)
    padding = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()
    extreme = source.masked_fill(padding[..., None], 1e4)
    _, state = encoder.prefill(extreme, encoder.init_state(3), key_padding_mask=padding)
    hidden, memory, nothing = tapes(state)
    found, weights, _ = layer.prefill(x, layer.init_state(hidden, memory, key_padding_mask=nothing))
    assert not weights[nothing[:, None].expand_as(weights)].any()
    for row in (0, 1):
        short = source[row][~padding[row]][None]
        _, state = encoder.prefill(short, encoder.init_state(1))
        hidden, memory, _ = tapes(state)
        expected, _, _ = layer.prefill(x[row : row + 1], layer.init_state(hidden, memory))
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=1e-12)


def test_deep_fusion_of_nothing_but_padding_reads_zeros():
    layer = fusing()
    tape = normal(2, 5, 4).requires_grad_()
    padding = torch.ones(2, 5, dtype=torch.bool)
    x = normal(2, 4, 3)
    found, weights, state = layer.prefill(x, layer.init_state(tape, tape, key_padding_mask=padding))
    assert not weights.any()
    assert not state.read.any()
    found.sum().backward()
    assert not tape.grad.any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_a_state_of_deep_fusion_is_a_value_for_beams():
    layer = fusing()
    state = layer.init_state(normal(2, 5, 4), normal(2, 5, 4, seed=1))
    x = normal(2, 3, 3)
    expected, _, after = layer.prefill(x, state)
    again, _, _ = layer.prefill(x[[1, 1, 0]], select(state, [1, 1, 0]))
    torch.testing.assert_close(again, expected[[1, 1, 0]], rtol=0, atol=1e-12)
    assert after.own.tape.shape[1] == state.own.tape.shape[1] + 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((2, 5, 4), (2, 6, 4)), r"hidden has shape \[2, 5, 4\] and memory \[2, 6, 4\], but both must be"),
        (((2, 5, 3), (2, 5, 3)), r"but both must be \[B, S, 4\]"),
        (((4,), (4,)), r"hidden has shape \[4\] and memory \[4\], but both must be"),
        (((2, 0, 4), (2, 0, 4)), "hidden has length 0, but must have at least one entry"),
    ],
)
def test_tapes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        fusing().init_state(*(torch.zeros(*size).double() for size in sizes))


@pytest.mark.parametrize(
    ("verb", "size", "message"),
    [
        ("step", (2, 4), r"x_t has shape \[2, 4\], but must be \[B, 3\]"),
        ("step", (3, 3), "for 3 rows"),
        ("prefill", (2, 3), r"x has shape \[2, 3\], but must be \[B, T, 3\]"),
        ("prefill", (2, 0, 3), r"x has shape \[2, 0, 3\], but must have at least one step"),
    ],
)
def test_inputs_of_deep_fusion_that_do_not_fit_are_refused(verb, size, message):
    layer = fusing()
    state = layer.init_state(normal(2, 5, 4), normal(2, 5, 4, seed=1))
    with pytest.raises(ValueError, match=message):
        getattr(layer, verb)(torch.zeros(*size).double(), state)
