import pytest
import torch

from models.kit import assert_same, read
from unrolled import recurrent
from unrolled.generation import generate
from unrolled.models import RecurrentLM, RecurrentLMConfig
from unrolled.ops.state import select

SMALL = {"d_model": 8, "n_layers": 2, "start_token": True}
CELLS = recurrent.names()


def make(cell="lstm", **fields):
    torch.manual_seed(0)
    return RecurrentLM(RecurrentLMConfig(11, cell=cell, **SMALL | fields)).double().eval()


def tokens(*shape):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cell", CELLS)
def test_forward_is_prefill_is_step(cell):
    model, ids = make(cell), tokens(3, 9)
    expected = model(ids)
    whole, after = model.prefill(ids, model.init_state(3))
    assert_same(whole, expected)
    logits, state = read(model, [ids[:, :4], *ids[:, 4:].unbind(1)])
    assert_same(logits, expected)
    for a, b in zip(state.layers, after.layers, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    beams, _ = model.step(ids[[2, 0], 0], select(after, [2, 0]))
    assert_same(beams, model.step(ids[:, 0], after)[0][[2, 0]])


@pytest.mark.parametrize("cell", CELLS)
def test_padding_and_packing_change_nothing(cell):
    model, ids = make(cell), tokens(1, 12)
    rows = ids.split([5, 1, 6], 1)
    alone = torch.cat([model(row)[0] for row in rows])
    packed = model(ids, cu_seqlens=torch.tensor([0, 5, 6, 12], dtype=torch.int32))
    assert_same(packed[0], alone)
    padding = torch.tensor(
        [[1, 1, 0, 0, 0, 0, 0, 1], [1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 1, 0]]
    ).bool()
    padded = tokens(3, 8).masked_scatter(~padding, ids)
    assert_same(model(padded, key_padding_mask=padding)[~padding], alone)
    targets = tokens(3, 8)
    loss = model.loss(padded, targets, key_padding_mask=padding)
    expected = torch.nn.functional.cross_entropy(alone, targets[~padding])
    assert_same(loss, expected)


def test_it_learns_a_short_text_by_heart_and_writes_it():
    text = torch.tensor([*b"a cell that remembers what it has read"]) % 11
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentLMConfig(11, cell="gru", d_model=32, start_token=True, tie_embeddings=True))
    inputs = torch.cat([torch.tensor([11]), text[:-1]])[None]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(120):
        optimizer.zero_grad()
        loss = model.loss(inputs, text[None])
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    (written,) = generate(model, [[]], len(text), temperature=0)
    assert torch.equal(written, text)


def test_dropout_acts_in_training_alone():
    model = make(dropout=0.5)
    assert torch.equal(model(tokens(1, 4)), model(tokens(1, 4)))
    model.train()
    assert not torch.equal(model(tokens(1, 4)), model(tokens(1, 4)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cell": "lstn"}, r"cell is 'lstn', but must be one of gru, .*lstm"),
        (
            {"cell_options": {"rang": 3}, "cell": "low_rank_rnn"},
            "cell_options of 'low_rank_rnn' do not fit.*'rang'",
        ),
        ({"hidden_size": 6, "tie_embeddings": True}, "hidden_size is 6, but must be d_model = 8"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.step(tokens(2), (0,)), "state is a tuple, but must be a StackedState of 2 layers"),
        (lambda m: m.step(tokens(2), m.init_state(3)), r"state\.h is torch.float64"),
        (lambda m: m.step(tokens(2, 1), m.init_state(2)), r"token is torch.int64 of shape \[2, 1\]"),
        (lambda m: m(torch.tensor([[0, 12]])), "ids from 0 to 12"),
    ],
)
def test_a_wrong_state_or_token_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(make())
