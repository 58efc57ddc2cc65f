"""The singular values of attention matrices, against numpy's decomposition of what the equation says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unrolled.bench import spectra
from unrolled.contract import Batch, UnsupportedError
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig


def encoder(**options):
    torch.manual_seed(0)
    sizes = {"d_model": 8, "n_layers": 2, "n_heads": 2, "max_length": 9, "attention": "softmax"}
    config = EncoderConfig(vocab_size=11, n_classes=2, positions="learned", **sizes | options)
    model = Encoder(config).eval()
    for block in model.stack.blocks:
        block.attention.qkv_proj.weight.data.mul_(30)  # sharp enough that the matrices are not of rank one
    return model


def expected_weights(model, layer, tokens):
    """The softmax of the definition, `[H,T,T]`, in numpy, of a model without rotary positions."""
    x = model.dropout(model.positions(model.embedding(tokens)))
    for block in model.stack.blocks[: layer - 1]:
        x = block(x)
    block = model.stack.blocks[layer - 1]
    read = block.attention_norm(x) if block.norm == "pre" else x
    q, k, _ = (y.detach()[0].transpose(0, 1).double().numpy() for y in block.attention.project(read))
    scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
    return scores / scores.sum(-1, keepdims=True)


def expected_mass(weights):
    found = np.linalg.svd(weights, compute_uv=False)
    return found[..., : -(-found.shape[-1] // 4)].sum(-1) / found.sum(-1)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 16])
def test_the_mass_is_that_of_numpys_singular_values(n):
    weights = torch.randn(2, 3, n, n, generator=torch.Generator().manual_seed(n)).softmax(-1)
    torch.testing.assert_close(
        spectra.spectral_mass(weights), torch.from_numpy(expected_mass(weights.double().numpy()))
    )


def test_a_rank_of_a_quarter_has_all_of_the_mass_and_the_identity_a_quarter():
    factors = torch.rand(2, 8, 2)
    assert spectra.spectral_mass(factors[0] @ factors[1].mT).item() == pytest.approx(1, abs=1e-6)
    assert spectra.spectral_mass(torch.eye(8)).item() == pytest.approx(0.25)


@pytest.mark.parametrize("layer", [1, 2])
def test_the_weights_are_those_of_the_definition(layer):
    model, tokens = encoder(), torch.randint(11, (1, 9), generator=torch.Generator().manual_seed(1))
    found = spectra.attention_weights(model, layer, tokens)
    np.testing.assert_allclose(found[0].numpy(), expected_weights(model, layer, tokens), atol=1e-5)
    assert not model.stack.blocks[layer - 1].attention._forward_pre_hooks


def test_rotary_positions_and_the_causal_mask_are_in_the_weights():
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "positions": "rotary"}
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=11, attention="softmax", **sizes)).eval()
    weights = spectra.attention_weights(model, 1, torch.full((1, 6), 3))
    assert torch.equal(weights, weights.tril())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 6))
    model.stack.blocks[0].attention.qkv_proj.weight.data.mul_(50)
    [head, _] = spectra.attention_weights(model, 1, torch.full((1, 6), 3))[0]
    assert head[5].std() > 0.01, "equal tokens differ by their places only"


def test_the_mean_is_over_heads_and_examples_without_their_padding():
    model, tokens = encoder(), torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(2))
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 5:] = True
    batches = [
        Batch(tokens[[i]], torch.tensor([0]), padding[[i]] if i else None) for i in range(3)
    ]  # where no row has padding there may be no mask
    dataset = SimpleNamespace(eval_batches=lambda size: iter(batches))
    found = spectra.mean_mass(model, dataset, 2, examples=2)
    parts = [expected_mass(expected_weights(model, 2, x)) for x in (tokens[[0]], tokens[[1], :5])]
    assert found == pytest.approx(np.mean(parts), abs=1e-6)


def test_what_cannot_be_measured_is_refused():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    for layer in (0, 3):
        with pytest.raises(ValueError, match=f"layer is {layer}, but must be from 1 to 2, as the model has"):
            spectra.attention_weights(encoder(), layer, tokens)
    with pytest.raises(UnsupportedError, match="performer attention does not compute weights"):
        spectra.attention_weights(encoder(attention="performer"), 1, tokens)
