"""Agreement with independent implementations. Opt-in: `make test-oracles` installs them."""

import pytest
import torch
from agreement import assert_agree, normal
from oracles.comparing import assert_all_agree
from torch import nn

from unrolled.models import Perceiver, PerceiverConfig, PerceiverIO, PerceiverIOConfig
from unrolled.ops.positions import fourier_features, grid_positions

pytestmark = pytest.mark.oracles
HUGGING_FACE = "transformers 5.24.0"
LUCIDRAINS = "perceiver-pytorch 0.11.0"


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def copy(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy the weights of a linear layer or a norm."""
    ours.weight.data.copy_(theirs.weight)
    if theirs.bias is not None:
        ours.bias.data.copy_(theirs.bias)
    elif ours.bias is not None:
        ours.bias.data.zero_()


def stack_linear(ours: nn.Linear, *theirs: nn.Linear) -> None:
    """Copy several layers of one input into one."""
    ours.weight.data.copy_(torch.cat([layer.weight for layer in theirs]))
    biases = [
        torch.zeros(len(layer.weight)).double() if layer.bias is None else layer.bias for layer in theirs
    ]
    ours.bias.data.copy_(torch.cat(biases))


def copy_hugging_face_cross(ours, theirs):
    attention = theirs.attention.self
    copy(ours.query_norm, attention.layernorm1)
    copy(ours.array_norm, attention.layernorm2)
    copy(ours.q_proj, attention.query)
    stack_linear(ours.kv_proj, attention.key, attention.value)
    copy(ours.out_proj, theirs.attention.output.dense)
    copy(ours.ff_norm, theirs.layernorm)
    copy(ours.ff.up, theirs.mlp.dense1)
    copy(ours.ff.down, theirs.mlp.dense2)


def copy_hugging_face_block(ours, theirs):
    attention = theirs.attention.self
    copy(ours.attention_norm, attention.layernorm1)
    stack_linear(ours.attention.qkv_proj, attention.query, attention.key, attention.value)
    copy(ours.attention.out_proj, theirs.attention.output.dense)
    copy(ours.ff_norm, theirs.layernorm)
    copy(ours.ff.up, theirs.mlp.dense1)
    copy(ours.ff.down, theirs.mlp.dense2)


@pytest.mark.parametrize("query_residual", [True, False])
def test_hugging_face_perceiver_with_a_decoder(query_residual):
    transformers = pytest.importorskip("transformers")
    decoders = pytest.importorskip("transformers.models.perceiver.modeling_perceiver")
    theirs_config = transformers.PerceiverConfig(
        num_latents=6, d_latents=16, d_model=12, num_blocks=2, num_self_attends_per_block=3,
        num_self_attention_heads=4, num_cross_attention_heads=2, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    decoder = decoders.PerceiverBasicDecoder(
        theirs_config, output_num_channels=5, output_index_dims=1, num_channels=16, num_heads=2,
        position_encoding_type="trainable", trainable_position_encoding_kwargs={"num_channels": 16, "index_dims": 1},
        use_query_residual=query_residual,
    )  # fmt: skip
    theirs = randomised(transformers.PerceiverModel(theirs_config, decoder=decoder))
    ours = PerceiverIO(
        PerceiverIOConfig(
            input_dim=12, positions="none", n_classes=5, query_residual=query_residual, n_latents=6,
            d_model=16, n_layers=3, n_heads=4, n_iterations=2, cross_heads=2,
        )
    ).double()  # fmt: skip
    ours.latents.initial.data.copy_(theirs.embeddings.latents)
    (read,), (stack,) = ours.latents.reads, ours.latents.stacks
    copy_hugging_face_cross(read, theirs.encoder.cross_attention)
    for block, layer in zip(stack.blocks, theirs.encoder.self_attends, strict=True):
        copy_hugging_face_block(block, layer)
    copy_hugging_face_cross(ours.decoder, decoder.decoding_cross_attention)
    ours.queries.table.weight.data.copy_(decoder.output_position_encodings.position_embeddings)
    copy(ours.head.project, decoder.final_layer)

    x = normal(3, 20, 12).requires_grad_()
    keep = torch.ones(3, 20)
    keep[1, 13:], keep[2, ::2] = 0, 0
    expected = theirs(inputs=x, attention_mask=keep)
    hidden = ours.latents(ours.array(x), keep == 0)
    assert_agree(hidden, expected.last_hidden_state, "latents of a Perceiver IO", tolerance=1e-10)
    logits = ours(x, key_padding_mask=keep == 0)
    what = f"Perceiver IO, query residual {query_residual}"
    assert_all_agree(logits, expected.logits[:, 0], [x], what, tolerance=1e-10, library=HUGGING_FACE)


def test_hugging_face_fourier_features():
    """Theirs begin with the coordinates, then have all sines, then all cosines."""
    theirs = pytest.importorskip("transformers.models.perceiver.modeling_perceiver")
    places = grid_positions([5, 7]).flatten(0, 1)
    expected = theirs.generate_fourier_features(places.unsqueeze(0), num_bands=4, max_resolution=(5, 7))
    ours = fourier_features(places, 4, [5, 7], dtype=torch.float64).unflatten(-1, (2, 9))
    sines, cosines, coordinates = ours.split([4, 4, 1], dim=-1)
    found = torch.cat([coordinates.flatten(1), sines.flatten(1), cosines.flatten(1)], dim=-1)
    assert_agree(found, expected.view_as(found), "Fourier features", library=HUGGING_FACE)


@pytest.mark.parametrize(("depth", "share"), [(1, False), (2, False), (2, True), (4, True)])
def test_lucidrains_perceiver_of_several_iterations(depth, share):
    """Theirs has a gated feed-forward layer and a norm before the output, which are exchanged here for ours.

    Theirs shares cross-attends and stacks from the second iteration on. The paper shares all stacks, so the
    first one is made to join the others.
    """
    package = pytest.importorskip("perceiver_pytorch.perceiver_pytorch")
    theirs = package.Perceiver(
        num_freq_bands=4, depth=depth, max_freq=6, input_channels=3, input_axis=2, num_latents=5, latent_dim=16,
        cross_heads=1, latent_heads=4, cross_dim_head=14, latent_dim_head=4, num_classes=3,
        weight_tie_layers=share, self_per_cross_attn=2,
    )  # fmt: skip
    for module in theirs.modules():
        if isinstance(module, package.FeedForward):
            module.net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    theirs.to_logits[1] = nn.Identity()
    if share:
        theirs.layers[0].self_attns = theirs.layers[1].self_attns
    randomised(theirs)
    ours = Perceiver(
        PerceiverConfig(
            input_dim=3, grid=[6, 6], n_bands=4, positions="none", n_classes=3, n_latents=5, n_iterations=depth,
            d_model=16, n_layers=2, n_heads=4, cross_width=14, share_weights=share,
        )
    ).double()  # fmt: skip
    reads, stacks = ours.latents.reads, ours.latents.stacks
    assert len(reads) == len({id(layer.cross_attn) for layer in theirs.layers})
    assert len(stacks) == len({id(layer.self_attns) for layer in theirs.layers})
    ours.latents.initial.data.copy_(theirs.latents)
    for read, layer in zip(reads, theirs.layers, strict=False):
        copy(read.query_norm, layer.cross_attn.norm)
        copy(read.array_norm, layer.cross_attn.norm_context)
        copy(read.q_proj, layer.cross_attn.fn.to_q)
        copy(read.kv_proj, layer.cross_attn.fn.to_kv)
        copy(read.out_proj, layer.cross_attn.fn.to_out)
        copy(read.ff_norm, layer.cross_ff.norm)
        copy(read.ff.up, layer.cross_ff.fn.net[0])
        copy(read.ff.down, layer.cross_ff.fn.net[2])
    for stack, layer in zip(stacks, theirs.layers, strict=False):
        for block, (attention, ff) in zip(stack.blocks, layer.self_attns, strict=True):
            copy(block.attention_norm, attention.norm)
            stack_linear(block.attention.qkv_proj, attention.fn.to_q, attention.fn.to_kv)
            copy(block.attention.out_proj, attention.fn.to_out)
            copy(block.ff_norm, ff.norm)
            copy(block.ff.up, ff.fn.net[0])
            copy(block.ff.down, ff.fn.net[2])
    copy(ours.head.project, theirs.to_logits[2])

    x = normal(3, 6, 6, 3).requires_grad_()
    keep = torch.ones(3, 36, dtype=torch.bool)
    keep[1, 13:], keep[2, ::2] = False, False
    expected, found = theirs(x, mask=keep), ours(x, key_padding_mask=~keep)
    what = f"Perceiver, iterations {depth}, shared {share}"
    assert_all_agree(found, expected, [x], what, tolerance=1e-10, library=LUCIDRAINS)
