"""The Vision Transformer: patches as a convolution, its equations, any mechanism, other image sizes."""

import pytest
import torch
from small_models import small_model
from torch.nn import functional as F  # noqa: N812

from models.kit import assert_same, randomised
from unrolled.models import ViT, ViTConfig
from unrolled.models.vit import PatchEmbedding

SMALL = {"image_size": [6, 8], "patch_size": [3, 2], "channels": 2, "n_classes": 5, "d_model": 16, "n_heads": 4, "n_layers": 2}  # fmt: skip
VIDEO = {"image_size": [4, 6, 8], "patch_size": [2, 3, 2], "pooling": "mean"}


def vit(**fields) -> ViT:
    torch.manual_seed(0)
    return randomised(ViT(ViTConfig(**SMALL | fields)))


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("patch", [[3, 2], [2, 3, 2]], ids=str)
def test_the_patch_embedding_is_a_strided_convolution(patch):
    embedding = PatchEmbedding(2, patch, 16).double()
    x = normal(3, 2, *(2 * p for p in patch[:-1]), 4 * patch[-1])
    convolve = F.conv2d if len(patch) == 2 else F.conv3d
    weight, bias = embedding.project.weight, embedding.project.bias
    expected = convolve(x, weight.reshape(16, 2, *patch), bias, stride=patch)
    assert_same(embedding(x), expected.flatten(2).mT)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_it_is_what_the_paper_says(pooling):
    model, x = vit(pooling=pooling), normal(3, 2, 6, 8)
    z = model.embedding(x)
    if pooling == "class":
        z = torch.cat([model.class_token.repeat(3, 1, 1), z], 1)
    z = z + model.positions.table.weight
    for block in model.stack.blocks:
        z = z + block.attention(block.attention_norm(z))
        z = z + block.ff.down(F.gelu(block.ff.up(block.ff_norm(z))))
    z = model.stack.norm(z)
    assert_same(model.tokens(x), z)
    y = z[:, 0] if pooling == "class" else z.mean(1)
    assert_same(model(x), y @ model.head.project.weight.T + model.head.project.bias)


def test_the_sizes_are_those_of_the_paper():
    config = ViTConfig(image_size=[224, 224], patch_size=[16, 16], n_classes=1000, d_model=768, n_heads=12, n_layers=12)  # fmt: skip
    assert config.n_tokens == config.max_length == 197
    with torch.device("meta"):
        model = ViT(config)
    assert sum(p.numel() for p in model.parameters()) == 86_567_656


def test_positions_tell_the_patches_apart():
    x = normal(1, 2, 6, 8)
    flipped = x.reshape(1, 2, 6, 4, 2).flip(3).reshape(x.shape)  # the columns of patches, in another order
    assert (vit()(x) - vit()(flipped)).abs().max() > 1e-3
    blind = vit(positions="none")
    assert_same(blind(x), blind(flipped))


def test_the_loss_is_the_mean_over_labelled_images():
    model, x = vit(), normal(3, 2, 6, 8)
    targets = torch.tensor([1, -100, 4])
    assert_same(model.loss(x, targets), F.cross_entropy(model(x)[[0, 2]], targets[[0, 2]]))
    assert float(model.loss(x, torch.full((3,), -100)).detach()) == 0


def test_videos_go_through_grid_attention():
    options = {"spatiotemporal": {"shape": [2, 2, 4], "relative": True}}
    model = vit(**VIDEO, attention="spatiotemporal", attention_options=options)
    x = normal(2, 2, 4, 6, 8).requires_grad_()
    y = model.tokens(x)
    assert y.shape == (2, 16, 16)
    (read,) = torch.autograd.grad(y[0, 0].sum(), x)
    assert read[1].abs().max() == 0
    patches = read[0].abs().reshape(2, 2, 2, 2, 3, 4, 2).sum((0, 2, 4, 6))
    differ = sum((i > 0).long() for i in torch.meshgrid(*map(torch.arange, (2, 2, 4)), indexing="ij"))
    assert torch.equal(patches > 0, differ <= 2)  # each of the two layers goes along one axis


@pytest.mark.parametrize("fields", [{}, {"pooling": "mean"}, VIDEO], ids=str)
def test_learned_positions_are_interpolated_for_other_sizes(fields):
    model = vit(**fields)
    size, grid, x = model.config.image_size, model.config.grid, normal(1, 2, *model.config.image_size)
    model.documents, model.gradient_checkpointing = {"classes.json": ["a"]}, True
    same = model.resized(size)
    assert same is not model
    assert same.documents == model.documents == {"classes.json": ["a"]}
    assert same.gradient_checkpointing
    assert_same(same(x), model(x))

    table = model.positions.table.weight
    n_own = len(table) - model.embedding(x).shape[1]
    rising = torch.linspace(0, 1, grid[-1], dtype=torch.float64)  # from column to column
    table.data[n_own:] = rising.repeat(len(table) // grid[-1]).unsqueeze(1)
    larger = model.resized([2 * n for n in size])
    assert larger.config.n_tokens == larger.config.max_length == len(larger.positions.table.weight)
    assert torch.equal(larger.positions.table.weight[:n_own], table[:n_own])
    rows = larger.positions.table.weight[n_own:, 0].detach().reshape(-1, 2 * grid[-1])
    assert_same(rows, rows[:1].expand_as(rows))
    assert (rows[0].diff() >= 0).all() or len(grid) == 2  # cubics overshoot at the ends
    assert (rows[0, 1:-1].diff() > 0).all()
    assert_same(rows[0] + rows[0].flip(0), torch.ones_like(rows[0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 8}, "image_size is 8, but must be a list of 2 to 3 integers"),
        ({"patch_size": [4]}, r"patch_size is \[4\], but must be a list"),
        ({"patch_size": [4, 2]}, r"patch_size is \[4, 2\], but must divide image_size = \[6, 8\]"),
        ({"patch_size": [2, 3, 2]}, "but must divide"),
        ({"n_classes": 0}, "n_classes is 0"),
        ({"max_length": 12}, "max_length is 12, but must be 9, the number of tokens"),
        ({"attention": "spatiotemporal", "pooling": "mean"}, r"layer 0 is None, but must end in \[2, 4\]"),
        (
            {"attention": "spatiotemporal", "attention_options": {"spatiotemporal": {"shape": [1, 2, 4]}}},
            "pooling is 'class', but must be 'mean' with spatiotemporal attention",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**SMALL | fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(normal(1, 2, 8, 6)), r"x is torch.float64 of shape \[1, 2, 8, 6\], but must be .* \[B, 2, 6, 8\]"),
        (lambda m: m(torch.zeros(1, 2, 6, 8, dtype=torch.uint8)), r"x is torch\.uint8"),
        (lambda m: m.float()(normal(1, 2, 6, 8)), "x is torch.float64, but the weights are torch.float32"),
        (lambda m: m.resized([2, 6, 8]), r"patch_size is \[3, 2\], but must divide image_size = \[2, 6, 8\]"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(vit())


def test_interpolated_positions_are_bicubic_between_the_centres_of_patches():
    model = small_model("vit", image_size=[16, 16], max_length=17)
    own, places = model.positions.table.weight.split([1, 16])
    table = model.resized([8, 8]).positions.table.weight
    halved = torch.tensor([[0.5, 0.59375, -0.09375, 0], [0, -0.09375, 0.59375, 0.5]])  # cubic, a = -3/4
    expected = torch.einsum("ip,jq,pqd->ijd", halved, halved, places.reshape(4, 4, -1))
    torch.testing.assert_close(table, torch.cat([own, expected.flatten(0, 1)]))


@pytest.mark.parametrize("training", [True, False])
def test_a_resized_model_is_in_the_mode_of_its_original(training):
    assert small_model("vit").train(training).resized([16, 16]).training is training
