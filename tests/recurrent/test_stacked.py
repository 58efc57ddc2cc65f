"""Stacks and pairs of directions are those of torch, and owe the contract what their layers owe."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unrolled import recurrent
from unrolled.contract import UnsupportedError
from unrolled.ops.dropout import Dropout
from unrolled.ops.packing import pack
from unrolled.recurrent import Bidirectional, RecurrentLayer, Stacked
from unrolled.recurrent.gru import GRU
from unrolled.recurrent.lstm import LSTM
from unrolled.recurrent.lstmn import LSTMN
from unrolled.recurrent.rnn import RNN
from unrolled.testing import CellMaker, check_compiles, check_dynamic_length, check_half_precision, checks

TORCH = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class Three(Stacked):
    """Layers of different widths and states."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__([LSTM(input_size, 6), GRU(6, 5), RNN(5, hidden_size)], dropout=0.5)


class Tapes(Stacked):
    """A state that grows on top of one that does not, whose fields have the same names."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__([LSTMN(input_size, 4, tape_length=3), LSTMN(4, hidden_size)])


class Both(Bidirectional):
    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(LSTM(input_size, hidden_size - 5), GRU(input_size, 5))


class Deep(Stacked):
    def __init__(self, input_size: int, hidden_size: int):
        super().__init__([Both(input_size, 8), LSTM(8, 6), Both(6, hidden_size)])


class Nested(Bidirectional):
    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(Stacked([RNN(input_size, 3), GRU(3, 7)]), LSTM(input_size, hidden_size - 7))


# These take seconds. `Deep` stands for all: it holds stacks, pairs of directions, and pairs in a stack.
SLOW = (check_compiles, check_dynamic_length, check_half_precision)
CASES = [
    pytest.param(
        kind,
        check,
        id=f"{kind.__name__}-{check.__name__.removeprefix('check_')}",
        marks=[pytest.mark.compilers] if check is check_compiles else [],
    )
    for kind in (Three, Tapes, Both, Deep, Nested)
    for check in checks(CellMaker(kind).supports)
    if kind is Deep or check not in SLOW
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "check"), CASES)
def test_contract(kind, check):
    make = CellMaker(kind)
    check(make, make.supports)


def test_what_a_stack_can_do_is_what_all_its_layers_can():
    assert Three(4, 4).supports == RecurrentLayer.supports
    assert Tapes(4, 4).supports.recurrence == "growing"
    for layer in (Both(4, 8), Deep(4, 8), Nested(4, 8)):
        assert layer.supports.recurrence == "none"
        assert layer.supports.bidirectional
        assert not layer.supports.causal
    cell = recurrent.load("linear_attention")
    assert Stacked([cell(4, 4, n_heads=2), cell(4, 4, n_heads=2)]).supports.dynamic_length
    assert Bidirectional(cell(4, 4, n_heads=2), cell(4, 4, n_heads=2)).supports.dynamic_length


def ours(cell: str, sizes: list[int], both: bool) -> Stacked:
    make: Any = recurrent.load(cell)
    torch.manual_seed(0)
    if both:
        widths = [sizes[0], *(2 * n for n in sizes[1:])]
        layers = [Bidirectional(make(a, b), make(a, b)) for a, b in zip(widths, sizes[1:], strict=False)]
    else:
        layers = [make(a, b) for a, b in pairwise(sizes)]
    return Stacked(layers, dropout=0.5).double().eval()


def copied(mine: Stacked, theirs: nn.RNNBase) -> list[tuple[Tensor, str, int]]:
    """Give torch our weights; name its parameter that each of ours is, from some row on."""
    found = []
    for i, layer in enumerate(mine.layers):
        cells = [layer.left_to_right, layer.right_to_left] if isinstance(layer, Bidirectional) else [layer]
        for cell, suffix in zip(cells, (f"_l{i}", f"_l{i}_reverse"), strict=False):
            found += [
                (cell.input_proj.weight, f"weight_ih{suffix}", 0),
                (cell.input_proj.bias, f"bias_ih{suffix}", 0),
                (cell.recurrent, f"weight_hh{suffix}", 0),
            ]
            getattr(theirs, f"bias_hh{suffix}").data.zero_()  # torch adds two biases: a second one of zeros
            if isinstance(cell, GRU):
                found.append((cell.recurrent_bias, f"bias_hh{suffix}", 2 * cell.hidden_size))
    for weight, name, start in found:
        getattr(theirs, name).data[start:] = weight.data
    return found


@settings(max_examples=60, derandomize=True)
@given(
    cell=st.sampled_from(sorted(TORCH)),
    both=st.booleans(),
    n_layers=st.integers(1, 3),
    input_size=st.integers(1, 5),
    hidden_size=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_rows_of_any_length_are_as_torch_has_them(cell, both, n_layers, input_size, hidden_size, lengths):
    mine = ours(cell, [input_size] + n_layers * [hidden_size], both)
    theirs = TORCH[cell](
        input_size, hidden_size, n_layers, batch_first=True, bidirectional=both, dropout=0.5 * (n_layers > 1)
    )
    theirs = theirs.double().eval()
    weights = copied(mine, theirs)
    T = max(lengths)
    padding = torch.arange(T) >= torch.tensor(lengths).unsqueeze(1)
    x = torch.randn(len(lengths), T, input_size, dtype=torch.float64).requires_grad_()
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    expected, _ = pad_packed_sequence(theirs(packed)[0], batch_first=True)
    expected = expected[~padding]
    rows = [row[:n] for row, n in zip(x, lengths, strict=True)]
    together, cu_seqlens = pack(rows)
    found = {
        "padded": mine(x, key_padding_mask=padding)[~padding],
        "packed": mine(together, cu_seqlens=cu_seqlens)[0],
        "alone": torch.cat([mine(row.unsqueeze(0))[0] for row in rows]),
    }
    loss = torch.randn_like(expected)
    names, parameters = zip(*theirs.named_parameters(), strict=True)
    d_x, *gradients = torch.autograd.grad((expected * loss).sum(), [x, *parameters])
    by_name = dict(zip(names, gradients, strict=True))
    for how, y in found.items():
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12, msg=how)
        first, *gradients = torch.autograd.grad((y * loss).sum(), [x, *(weight for weight, _, _ in weights)])
        torch.testing.assert_close(first, d_x, rtol=1e-10, atol=1e-11, msg=how)
        for (_, name, start), gradient in zip(weights, gradients, strict=True):
            torch.testing.assert_close(gradient, by_name[name][start:], rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("cell", sorted(TORCH))
def test_both_directions_end_where_torchs_do(cell):
    mine = ours(cell, [3, 4], True)
    theirs = TORCH[cell](3, 4, batch_first=True, bidirectional=True).double()
    copied(mine, theirs)
    x, lengths = torch.randn(3, 6, 3, dtype=torch.float64), torch.tensor([4, 6, 1])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    _, expected = theirs(packed)
    (layer,) = mine.layers
    y, ends = layer.read(x, key_padding_mask=torch.arange(6) >= lengths.unsqueeze(1))
    for i, state in enumerate(ends):
        for part, end in zip(state, expected if cell == "lstm" else [expected], strict=True):
            torch.testing.assert_close(part, end[i], rtol=0, atol=1e-12)
    torch.testing.assert_close(y[:, 0, 4:], ends.right_to_left[0], rtol=0, atol=1e-12)
    _, ends = layer.read(x)
    for i, state in enumerate(ends):
        for part, end in zip(state, theirs(x)[1] if cell == "lstm" else [theirs(x)[1]], strict=True):
            torch.testing.assert_close(part, end[i], rtol=0, atol=1e-12)


def test_dropout_acts_between_layers_in_training_alone():
    torch.manual_seed(0)
    first, second = LSTM(3, 4), GRU(4, 5)
    stack, x = Stacked([first, second], dropout=0.5), torch.randn(2, 6, 3)
    assert torch.equal(stack.eval()(x), second(first(x)))
    stack.train()
    for run in (stack, lambda x: stack.prefill(x, stack.init_state(2))[0]):
        torch.manual_seed(1)
        found = run(x)
        torch.manual_seed(1)
        assert torch.equal(found, second(Dropout(0.5)(first(x))))
    torch.manual_seed(1)
    found, _ = stack.step(x[:, 0], stack.init_state(2))
    torch.manual_seed(1)
    below = Dropout(0.5)(first.step(x[:, 0], first.init_state(2))[0])
    assert torch.equal(found, second.step(below, second.init_state(2))[0])


def test_what_reads_both_ways_has_no_recurrence():
    x = torch.randn(2, 5, 4)
    for module in (Both(4, 8), Deep(4, 8), Stacked([Both(4, 8), LSTM(8, 3)])):
        for call in (lambda m: m.init_state(2), lambda m: m.prefill(x, ()), lambda m: m.step(x[:, 0], ())):
            with pytest.raises(UnsupportedError, match=r"bidirectional .* use forward"):
                call(module)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stacked([]), "layers is empty, but must have at least one layer"),
        (lambda: Stacked(3), "layers is 3, but must be a sequence of recurrent layers"),
        (lambda: Stacked([nn.LSTM(3, 4)]), r"layers\[0\] is a LSTM, but must be a RecurrentLayer"),
        (
            lambda: Stacked([LSTM(3, 4), GRU(5, 6)]),
            r"layers\[1\] has input_size 5, but must have 4, the hidden",
        ),
        (lambda: Stacked([LSTM(3, 4)], dropout=1.0), "dropout is 1.0, but must be a probability in .0, 1"),
        (lambda: Stacked([LSTM(3, 4)], dropout=True), "dropout is True, but must be a finite number"),
        (
            lambda: Bidirectional(LSTM(3, 4), LSTM(2, 4)),
            "right_to_left has input_size 2, but must have 3, that",
        ),
        (lambda: Bidirectional(LSTM(3, 4), None), "right_to_left is a NoneType, but must be a Recurrent"),
    ],
)
def test_wrong_layers_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_direction_must_be_one():
    with pytest.raises(UnsupportedError, match="left_to_right is a Both, which reads both ways already"):
        Bidirectional(Both(3, 8), LSTM(3, 4))


def test_a_state_of_another_stack_is_named():
    stack, x = Three(3, 4), torch.randn(2, 5, 3)
    state = stack.init_state(2)
    with pytest.raises(ValueError, match="state is a tuple, but must be a StackedState of 3 layers"):
        stack.prefill(x, tuple(state))
    with pytest.raises(
        ValueError, match="state is a StackedState of 2 layers, but must be a StackedState of 3"
    ):
        stack.step(x[:, 0], state._replace(layers=state.layers[:2]))
