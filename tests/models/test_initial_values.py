"""The initial values of models."""

import copy
import math

import pytest
import torch
from small_models import small_model

from unrolled import attention
from unrolled.models.blocks import init_weights
from unrolled.models.latents import CrossAttend


@pytest.mark.parametrize("name", [n for n in attention.names() if n != "spatiotemporal"])
def test_a_mechanism_keeps_its_own_initial_values_in_a_model(name):
    kind = "decoder" if attention.load(name).supports.causal else "encoder"
    model = small_model(kind, attention=name)
    layer = model.stack.blocks[0].attention
    before = copy.deepcopy(layer.state_dict())
    init_weights(model, model.config)
    drawn = {own for own, x in layer.state_dict().items() if not torch.equal(x, before[own])}
    assert drawn == {"qkv_proj.weight", "out_proj.weight"}


def test_biases_start_at_0():
    parameters = dict(small_model("decoder", attention="softmax").named_parameters())
    biases = [x for name, x in parameters.items() if name.endswith("bias")]
    assert len(biases) == 2 * 6 + 1  # of each block, and of the last norm
    assert not any(x.any() for x in biases)


def test_the_two_matrices_of_swiglu_are_drawn_separately():
    torch.manual_seed(0)
    up = small_model("encoder_decoder", activation="swiglu", d_ff=256).encoder.blocks[0].ff.up
    assert up.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (16 + 256)), rel=0.01)


def test_the_vectors_of_pixels_start_small():
    torch.manual_seed(0)
    embedding = small_model("decoder", inputs="pixels", start_token=True, d_model=512).embedding
    assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert embedding.start.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_mixture_starts_spread_over_the_range():
    bias = small_model("decoder", inputs="pixels", head="logistic_mixture", n_mixtures=4).head.project.bias
    weight, mean, log_scale = bias.chunk(3)
    assert not weight.any()
    torch.testing.assert_close(mean, torch.tensor([-0.75, -0.25, 0.25, 0.75]))
    torch.testing.assert_close(log_scale, torch.full((4,), math.log(0.5)))


def test_cross_attentions_start_at_the_scale_of_their_inputs():
    torch.manual_seed(0)
    model = small_model("perceiver_io", input_width=4, d_model=64, cross_width=64)
    for read in (x for x in model.modules() if isinstance(x, CrossAttend)):
        for layer in (read.q_proj, read.kv_proj, read.out_proj):
            assert layer.weight.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.15)


def test_the_block_that_reads_starts_like_the_others():
    torch.manual_seed(0)
    first = small_model("perceiver_ar", d_model=64).stack.blocks[0]
    assert first.attention.qkv_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert first.attention.out_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert first.ff.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_class_token_is_drawn_like_an_embedding():
    torch.manual_seed(0)
    token = small_model("vit", d_model=512).class_token
    assert token.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_tied_table_starts_at_the_scale_of_an_output_matrix():
    torch.manual_seed(0)
    model = small_model("recurrent_lm", vocab_size=100, d_model=64, tie_embeddings=True)
    assert model.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("kind", ["memnn", "memory_network"])
def test_the_tables_of_memory_networks_start_small(kind):
    torch.manual_seed(0)
    for table in small_model(kind, vocab_size=50, d_model=20, memory_size=50).parameters():
        assert table.std().item() == pytest.approx(0.1, rel=0.1)


def test_biases_of_the_rnnsearch_start_at_0():
    model = small_model("rnn_seq2seq")
    assert not any(
        x.any() for x in (model.first.bias, model.readout.bias, model.out.bias, model.cell.input_proj.bias)
    )
