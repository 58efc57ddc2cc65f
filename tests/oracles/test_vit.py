"""Agreement with independent implementations. Opt-in: `make test-oracles` installs them."""

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree
from torch import nn

from unrolled.models import ViT, ViTConfig

pytestmark = pytest.mark.oracles
HUGGING_FACE = "transformers 5.24.0"
SIZES = {"image_size": [12, 12], "patch_size": [4, 3], "channels": 3, "n_classes": 5, "d_model": 16, "n_heads": 4, "n_layers": 3, "d_ff": 24}  # fmt: skip


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.double().eval()


def theirs_config(transformers, **other):
    return transformers.ViTConfig(
        image_size=(12, 12), patch_size=(4, 3), num_channels=3, hidden_size=16, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=24, layer_norm_eps=1e-5, num_labels=5, **other,
    )  # fmt: skip


def copy(ours, theirs):
    ours.weight.data.copy_(theirs.weight)
    ours.bias.data.copy_(theirs.bias)


def copy_encoder(ours: ViT, theirs) -> None:
    projection = theirs.embeddings.patch_embeddings.projection
    ours.embedding.project.weight.data.copy_(projection.weight.flatten(1))
    ours.embedding.project.bias.data.copy_(projection.bias)
    ours.class_token.data.copy_(theirs.embeddings.cls_token[0, 0])
    ours.positions.table.weight.data.copy_(theirs.embeddings.position_embeddings[0])
    copy(ours.stack.norm, theirs.layernorm)
    for block, layer in zip(ours.stack.blocks, theirs.layers, strict=True):
        copy(block.attention_norm, layer.layernorm_before)
        copy(block.ff_norm, layer.layernorm_after)
        parts = [layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj]
        block.attention.qkv_proj.weight.data.copy_(torch.cat([part.weight for part in parts]))
        block.attention.qkv_proj.bias.data.copy_(torch.cat([part.bias for part in parts]))
        copy(block.attention.out_proj, layer.attention.o_proj)
        copy(block.ff.up, layer.mlp.fc1)
        copy(block.ff.down, layer.mlp.fc2)


def test_hugging_face_vit_model():
    transformers = pytest.importorskip("transformers")
    theirs = randomised(transformers.ViTModel(theirs_config(transformers), add_pooling_layer=False))
    ours = ViT(ViTConfig(**SIZES)).double().eval()
    copy_encoder(ours, theirs)
    x = normal(2, 3, 12, 12)
    found, expected = ours.tokens(x), theirs(x).last_hidden_state
    assert_all_agree(found, expected, [x], "ViT, all tokens", tolerance=1e-12, library=HUGGING_FACE)


def test_hugging_face_vit_for_image_classification():
    transformers = pytest.importorskip("transformers")
    theirs = randomised(transformers.ViTForImageClassification(theirs_config(transformers)))
    ours = ViT(ViTConfig(**SIZES)).double().eval()
    copy_encoder(ours, theirs.vit)
    copy(ours.head.project, theirs.classifier)
    x, labels = normal(2, 3, 12, 12), torch.tensor([3, 0])
    result = theirs(x, labels=labels)
    assert_agree(ours(x), result.logits, "ViT, logits", tolerance=1e-12, library=HUGGING_FACE)
    assert_agree(ours.loss(x, labels), result.loss, "ViT, loss", tolerance=1e-12, library=HUGGING_FACE)


def test_hugging_face_vit_at_another_resolution():
    transformers = pytest.importorskip("transformers")
    config = theirs_config(transformers)
    config.patch_size = 4  # theirs knows square patches only when it interpolates
    theirs = randomised(transformers.ViTModel(config, add_pooling_layer=False))
    ours = ViT(ViTConfig(**SIZES | {"patch_size": [4, 4]})).double().eval()
    copy_encoder(ours, theirs)
    x = normal(2, 3, 20, 16)
    expected = theirs(x, interpolate_pos_encoding=True).last_hidden_state
    found = ours.resized([20, 16]).tokens(x)
    assert_agree(found, expected, "ViT, positions interpolated", tolerance=1e-12, library=HUGGING_FACE)
