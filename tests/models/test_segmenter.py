"""The segmenter: its parts put together by hand, and what it learns."""

import pytest
import torch
from small_models import small_model

from unrolled.cli._overlap import intersection_over_union
from unrolled.contract import IGNORED, Batch
from unrolled.models.bits import bit_loss


def test_it_is_a_linear_layer_blocks_and_a_logit_for_each_bit():
    model = small_model("segmenter", positions="none").double().eval()
    x = torch.randn(2, 6, 4).double()
    z = x @ model.embedding.weight.T + model.embedding.bias
    for block in model.stack.blocks:
        z = z + block.attention(block.attention_norm(z))
        z = z + block.ff(block.ff_norm(z))
    expected = model.stack.norm(z) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def test_padding_is_not_read():
    model = small_model("segmenter", attention="softmax").eval()
    x, padding = torch.randn(1, 6, 4), torch.tensor([[False] * 4 + [True] * 2])
    found = model(x, key_padding_mask=padding)[:, :4]
    torch.testing.assert_close(found, model(x[:, :4]), rtol=0, atol=1e-5)


def test_autocast_does_not_narrow_the_residual_stream():
    model = small_model("segmenter", attention="softmax", positions="rotary").eval()
    seen = []
    model.stack.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(1, 6, 4))
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 5, 3), r"x has shape \[2, 5, 3\], but must be \[B, T, 4\]"),
        (torch.zeros(2, 5, 4, dtype=torch.long), "x is torch.int64, but the weights are torch.float32"),
        (None, "x is a NoneType, but must be a tensor"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(x, message):
    model = small_model("segmenter")
    with pytest.raises(ValueError, match=message):
        model(x)
    with pytest.raises(ValueError, match="targets is a list"):
        model.loss(torch.zeros(2, 5, 4), [1])


def test_the_loss_is_the_mean_over_the_bits_that_are_asked_for():
    logits = torch.tensor([[0.0, 2.0], [-1.0, 3.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, IGNORED], [0.0, 1.0]], dtype=torch.float64)
    p = logits.sigmoid()
    expected = -(p[0, 0].log() + (1 - p[1, 0]).log() + p[1, 1].log()) / 3
    torch.testing.assert_close(bit_loss(logits, targets), expected)
    assert bit_loss(logits, torch.full_like(targets, IGNORED)) == 0
    with pytest.raises(ValueError, match=r"targets .* but must be floating point \[2, 2\]"):
        bit_loss(logits, targets.long())


def test_padding_reaches_neither_the_loss_nor_the_gradients():
    model = small_model("segmenter", attention="softmax").eval()
    x, padding = torch.randn(2, 6, 4), torch.zeros(2, 6, dtype=torch.bool)
    targets = (model(x) > 0).float()
    padding[0, 4:] = True

    def loss_and_gradient():
        loss = model.loss(x, targets, key_padding_mask=padding)
        return loss, torch.autograd.grad(loss, model.embedding.weight)[0]

    expected = loss_and_gradient()
    x[padding], targets[padding] = torch.nan, 1 - targets[padding]
    torch.testing.assert_close(loss_and_gradient(), expected, rtol=0, atol=0)


class OneBatch:
    """Targets that `model` meets with 2 right of 3 found and of 4 wanted, and one it is not asked for."""

    def eval_batches(self, batch_size):
        inputs = torch.tensor([[[1.0], [1.0], [1.0], [-1.0], [-1.0], [1.0]]])
        targets = torch.tensor([[[1.0], [1.0], [0.0], [1.0], [1.0], [IGNORED]]])
        yield Batch(inputs, targets)


def test_intersection_over_union():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    assert intersection_over_union(model, OneBatch(), 1) == 2 / 5


def test_blocks_run_again_in_the_backward_pass_if_asked():
    model, calls = small_model("segmenter").train(), []
    model.stack.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing = True
    model(torch.randn(1, 6, 4)).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("value", [-0.5, 1.5, -99.0])
def test_targets_that_are_no_probabilities_are_refused(value):
    with pytest.raises(ValueError, match="each must be from 0 to 1"):
        bit_loss(torch.zeros(2), torch.tensor([0.5, value]))
