"""Mamba of transformers becomes a decoder that computes the same."""

import pytest
import torch
from agreement import assert_agree
from imported import assert_a_folder_is_read, assert_same_greedy_tokens, perturbed

from unrolled.contract import UnsupportedError
from unrolled.interop.hf import import_weights
from unrolled.models import Decoder

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "state_size": 6,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def mamba(**settings):
    return perturbed("Mamba", **SIZES | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layer_norm_epsilon": 0.1, "expand": 1, "conv_kernel": 3, "tie_word_embeddings": False},
        {"use_bias": True, "time_step_rank": 5, "hidden_act": "swish"},
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_are_equal(settings):
    theirs = mamba(**settings)
    ours = import_weights(theirs)
    assert isinstance(ours, Decoder)
    assert not ours.training
    tokens = torch.randint(1, 19, (2, 20))
    # With a bias, their convolution reads it at padding.
    padding = torch.arange(20) < torch.tensor([[0], [0 if "use_bias" in settings else 7]])
    expected = theirs(tokens, attention_mask=(~padding).long()).logits
    found = ours(tokens, key_padding_mask=padding)
    assert_agree(found[~padding], expected[~padding], f"MambaForCausalLM {settings}", tolerance=1e-5)


@torch.no_grad()
def test_what_is_generated_is_equal():
    assert_same_greedy_tokens(mamba())


def test_gradients_are_equal():
    theirs = mamba()
    ours = import_weights(theirs)
    tokens = torch.randint(1, 19, (2, 13))
    theirs(tokens, labels=tokens).loss.backward()
    ours.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    pairs = zip(ours.stack.layers, theirs.backbone.layers, strict=True)
    for number, (block, layer) in enumerate(pairs):
        found, expected = block.attention, layer.mixer
        for ours_weight, gradient in (
            (found.log_pace, expected.A_log.grad),
            (found.skip, expected.D.grad),
            (found.select_proj.weight, expected.x_proj.weight.grad),
            (found.step_proj.weight, expected.dt_proj.weight.grad),
            (found.step_proj.bias, expected.dt_proj.bias.grad),
            (found.short_conv.weight, expected.conv1d.weight.grad.squeeze(1)),
            (found.short_conv.bias, expected.conv1d.bias.grad),
            (found.out_proj.weight, expected.out_proj.weight.grad),
            (block.attention_norm.weight, layer.norm.weight.grad),
        ):
            assert_agree(ours_weight.grad, gradient, f"gradients of layer {number}", tolerance=1e-5)


def test_a_folder_is_read(tmp_path):
    assert_a_folder_is_read(mamba(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be 'silu'"),
        ({"use_conv_bias": False}, "use_conv_bias is False"),
        ({"conv_kernel": 1}, "conv_kernel is 1, but must be at least 2"),
    ],
)
def test_what_has_no_counterpart_is_refused(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        import_weights(mamba(**settings))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedError, match="MambaModel has no counterpart here"):
        import_weights(mamba().backbone)
