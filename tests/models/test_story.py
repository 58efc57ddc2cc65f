"""What both memory networks do alike: compile, take empty batches, and refuse wrong stories."""

import re

import pytest
import torch
from small_models import small_model

from models.stories import V, story

LONG = torch.long
both = pytest.mark.parametrize("kind", ["memnn", "memory_network"])


def make(kind):
    torch.manual_seed(0)
    return small_model(kind, vocab_size=V, memory_size=7, n_hops=2).double().eval()


def targets_of(kind, batch):
    return torch.ones(batch, 3, dtype=LONG) if kind == "memnn" else torch.zeros(batch, dtype=LONG)


@pytest.mark.compilers
@both
def test_it_can_be_compiled(kind):
    model, (inputs, padding) = make(kind), story()
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    arguments = (inputs, targets_of(kind, 4))
    expected = model.loss(*arguments, key_padding_mask=padding)
    torch.testing.assert_close(compiled(*arguments, key_padding_mask=padding), expected)


@both
def test_an_empty_batch(kind):
    model, nothing = make(kind), torch.zeros(0, 3, 2, dtype=LONG)
    assert model(nothing).shape == (0, V)
    assert model.attend(nothing).shape == (0, 2, 2)
    assert model.loss(nothing, targets_of(kind, 0)) == 0


@both
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(2, 1, 3, dtype=LONG), "inputs has shape [2, 1, 3], but must have at least one sentence"),
        (torch.zeros(2, 3, dtype=LONG), "inputs is torch.int64 of shape [2, 3], but must be torch.long [B, M + 1, J]"),
        (torch.zeros(2, 3, 3), "inputs is torch.float32 of shape [2, 3, 3], but must be torch.long [B, M + 1, J]"),
        (torch.zeros(2, 3, 0, dtype=LONG), "inputs has shape [2, 3, 0], but sentences must have at least one word"),
        (torch.zeros(2, 9, 3, dtype=LONG), "inputs has 8 sentences, but must have at most memory_size = 7"),
        (torch.full((2, 3, 3), V), "inputs holds ids from 11 to 11, but they must be in [0, 11)"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(kind, inputs, message):
    model = make(kind)
    for call in (model, model.attend, lambda x: model.loss(x, targets_of(kind, 2))):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(inputs)


@both
def test_a_wrong_mask_is_refused(kind):
    inputs, padding = story()
    with pytest.raises(ValueError, match=r"key_padding_mask is torch.bool of shape \[4, 6\], but must be"):
        make(kind)(inputs, key_padding_mask=padding[:, :, 0])
