"""Mamba-2 of transformers becomes a decoder that computes the same."""

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
    "num_heads": 4,
    "head_dim": 8,
    "expand": 2,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def mamba2(**settings):
    return perturbed("Mamba2", **SIZES | settings)


@pytest.mark.parametrize(
    "settings",
    [{"layer_norm_epsilon": 0.1}, {"use_bias": True, "tie_word_embeddings": True, "n_groups": 1}],
    ids=str,
)
@torch.no_grad()
def test_logits_are_equal(settings):
    theirs = mamba2(**settings)
    ours = import_weights(theirs)
    assert isinstance(ours, Decoder)
    assert not ours.training
    tokens = torch.randint(1, 19, (2, 20))
    # With a bias, their convolution reads it at padding.
    padding = torch.arange(20) < torch.tensor([[0], [0 if "use_bias" in settings else 7]])
    expected = theirs(tokens, attention_mask=(~padding).long()).logits
    found = ours(tokens, key_padding_mask=padding)
    assert_agree(found[~padding], expected[~padding], f"Mamba2ForCausalLM {settings}", tolerance=1e-5)


@torch.no_grad()
def test_options_replace_those_of_the_original():
    theirs, tokens = mamba2(), torch.randint(1, 19, (2, 9))
    ours = import_weights(theirs, eps=0.5)
    for layer in theirs.backbone.layers:
        layer.mixer.norm.variance_epsilon = 0.5
    assert_agree(ours(tokens), theirs(tokens).logits, tolerance=1e-5)


@torch.no_grad()
def test_what_is_generated_is_equal():
    assert_same_greedy_tokens(mamba2())


def test_gradients_are_equal():
    theirs = mamba2()
    ours = import_weights(theirs)
    tokens = torch.randint(1, 19, (2, 13))
    theirs(tokens, labels=tokens).loss.backward()
    ours.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    pairs = zip(ours.stack.layers, theirs.backbone.layers, strict=True)
    for number, (block, layer) in enumerate(pairs):
        found, expected = block.attention, layer.mixer
        for ours_weight, theirs_weight in (
            (found.log_pace, expected.A_log),
            (found.skip, expected.D),
            (found.out_proj.weight, expected.out_proj.weight),
            (found.step_proj.bias, expected.dt_bias),
        ):
            assert_agree(ours_weight.grad, theirs_weight.grad, f"gradients of layer {number}", tolerance=1e-5)


def test_a_folder_is_read(tmp_path):
    assert_a_folder_is_read(mamba2(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_step_limit": (0.0, 0.1)}, r"time_step_limit and hidden_act are \(0\.0, 0\.1\)"),
        ({"hidden_act": "gelu"}, "'gelu', but must be"),
        ({"use_conv_bias": False}, "use_conv_bias is False"),
    ],
)
def test_what_has_no_counterpart_is_refused(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        import_weights(mamba2(**settings))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedError, match="Mamba2Model has no counterpart here"):
        import_weights(mamba2().backbone)
