"""RWKV-4 of transformers becomes a decoder that computes the same."""

import pytest
import torch
import transformers
from agreement import assert_agree
from imported import assert_same_greedy_tokens, perturbed

from unrolled.contract import UnsupportedError
from unrolled.interop.hf import import_weights
from unrolled.models import Decoder

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "rescale_every": 0,
    "eos_token_id": None,
}


def rwkv(**settings):
    model = perturbed("Rwkv", **SIZES | settings)
    with torch.no_grad():
        model.rwkv.embeddings.weight.normal_()  # transformers draws them so small that the norm's eps counts
    return model


@pytest.mark.parametrize("settings", [{}, {"attention_hidden_size": 24, "intermediate_size": 20}], ids=str)
@torch.no_grad()
def test_logits_are_equal(settings):
    theirs, tokens = rwkv(**settings), torch.randint(0, 19, (2, 20))
    ours = import_weights(theirs)
    assert isinstance(ours, Decoder)
    assert not ours.training
    expected = theirs(tokens, use_cache=False).logits  # their cache takes only heads as wide as the model
    assert_agree(ours(tokens), expected, f"RwkvForCausalLM {settings}", tolerance=1e-5)


@torch.no_grad()
def test_weights_that_transformers_has_rescaled_are_restored():
    theirs, tokens = rwkv(rescale_every=2), torch.randint(0, 19, (2, 9))
    before = import_weights(theirs)(tokens)
    assert_agree(before, theirs.train()(tokens).logits, tolerance=1e-5)  # as they are trained
    theirs.eval()(tokens)
    assert theirs.rwkv.layers_are_rescaled
    assert torch.equal(import_weights(theirs)(tokens), before)


@torch.no_grad()
def test_what_is_generated_is_equal():
    assert_same_greedy_tokens(rwkv())


def test_gradients_are_equal():
    theirs = rwkv().train()
    ours = import_weights(theirs)
    tokens = torch.randint(0, 19, (2, 13))
    theirs(tokens, labels=tokens).loss.backward()
    ours.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    pairs = zip(ours.stack.layers, theirs.rwkv.blocks, strict=True)
    for number, (block, layer) in enumerate(pairs):
        found, expected = block.attention, layer.attention
        for ours_weight, theirs_weight in (
            (found.log_pace, expected.time_decay),
            (found.bonus, expected.time_first),
            (found.out_proj.weight, expected.output.weight),
            (block.ff.gate.weight, layer.feed_forward.receptance.weight),
        ):
            gradient = theirs_weight.grad.view(ours_weight.shape)
            assert_agree(ours_weight.grad, gradient, f"gradient in layer {number}", tolerance=1e-5)
        mixed, names = layer.feed_forward, ("key", "receptance")
        gradients = torch.cat([getattr(mixed, f"time_mix_{name}").grad[0] for name in names])
        assert_agree(block.ff.mix.grad, -gradients, f"gradient of the mixtures in {number}", tolerance=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_norm_epsilon": 1e-4}, "layer_norm_epsilon is 0.0001, but must be 1e-05"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but must be False"),
    ],
    ids=str,
)
def test_settings_without_a_counterpart_are_refused(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        import_weights(rwkv(**settings))


def test_models_without_a_head_are_refused():
    model = transformers.RwkvModel(transformers.RwkvConfig(**SIZES))
    with pytest.raises(UnsupportedError, match="RwkvModel has no counterpart here; use RwkvForCausalLM"):
        import_weights(model)


@torch.no_grad()
def test_a_saved_model_is_read(tmp_path):
    theirs, tokens = rwkv(), torch.randint(0, 19, (1, 9))
    theirs.save_pretrained(tmp_path / "rwkv")
    assert_agree(import_weights(tmp_path / "rwkv")(tokens), theirs(tokens).logits, tolerance=1e-5)
