"""What is specific to Linformer: what it projects, what is shared, how short inputs fare."""

import copy
import math

import pytest
import torch
from agreement import assert_same, normal
from contract_parts import in_two_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unrolled.attention.linformer import (
    Convolution,
    LinearProjection,
    LinformerAttention,
    MaxPooling,
    MeanPooling,
    Projection,
    linformer_attention,
    linformer_reference,
)
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.models import Encoder, EncoderConfig
from unrolled.testing import Maker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("projection", "sharing"),
    [("linear", "none"), ("mean", "key-value"), ("max", "layerwise"), ("convolution", "none")],
)
@in_two_parts
def test_every_projection_keeps_the_contract(projection, sharing, check_part):
    options = {"projection": projection, "sharing": sharing, "rank": 160, "max_length": 640}
    check_part(Maker(LinformerAttention, options))


def test_with_as_many_slots_as_tokens_and_identities_it_is_softmax_attention():
    module, softmax = (
        LinformerAttention(8, 2, rank=9, max_length=9).double(),
        SoftmaxAttention(8, 2).double(),
    )
    softmax.load_state_dict(module.state_dict(), strict=False)
    for projection in (module.projection, module.value_projection):
        nn.init.eye_(projection.weight)
    x = normal(2, 9, 8).requires_grad_()
    assert_same(module(x), softmax(x), [x])


@settings(max_examples=40)
@given(T=st.integers(1, 9), S=st.integers(1, 12), rank=st.integers(1, 12), seed=st.integers(0, 99))
def test_it_is_its_equation_for_the_valid_tokens_alone(T, S, rank, seed):
    shapes = (2, T, 4, 3), (2, S, 2, 3), (2, S, 2, 5)
    q, k, v = inputs = [normal(*shape, seed=seed + i).requires_grad_() for i, shape in enumerate(shapes)]
    E, F = (LinearProjection(rank, 12, 2).double() for _ in range(2))
    padding = torch.rand(2, S, generator=torch.Generator().manual_seed(seed)) < 0.3
    expected = torch.zeros(2, T, 4, 5, dtype=torch.float64)
    for b in range(2):
        keep = ~padding[b]
        n = int(keep.sum())
        for h in range(4):
            g = h // 2  # two query heads for each key head
            expected[b, :, h] = linformer_reference(
                q[b, :, h], k[b, keep, g], v[b, keep, g], E.weight[g, :, :n], F.weight[g, :, :n]
            )
    found = linformer_attention(*inputs, E, F, key_padding_mask=padding)
    assert_same(found, expected, [*inputs, E.weight, F.weight], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sharing", "distinct"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)]
)
def test_twelve_layers_of_twelve_heads_have_the_papers_number_of_matrices(sharing, distinct):
    model = encoder(sharing=sharing, n_layers=12, n_heads=12, d_model=12)
    size = 4 * 8
    found = sum(p.numel() for name, p in model.named_parameters() if "projection" in name)
    assert found == distinct * size
    saved = sum(x.numel() for name, x in model.state_dict().items() if "projection" in name)
    assert saved == distinct * size


def encoder(*, sharing, n_layers=3, n_heads=2, d_model=8):
    torch.manual_seed(0)
    options = {"linformer": {"sharing": sharing, "rank": 4, "max_length": 8}}
    fields = {"n_layers": n_layers, "n_heads": n_heads, "d_model": d_model, "n_classes": 3, "max_length": 8}
    return Encoder(EncoderConfig(7, attention="linformer", attention_options=options, **fields))


def test_the_layers_of_a_model_train_the_matrix_that_they_share():
    model, tokens = encoder(sharing="layerwise"), torch.randint(7, (2, 6))
    layers = [block.attention for block in model.stack.blocks]
    assert all(layer.projection is layers[0].projection for layer in layers)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.stack.blocks[0].attention.projection.weight.zero_()
    for layer in layers:  # each layer by itself depends on it
        x = torch.randn(1, 6, 8)
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), layers[0].projection.weight)
        assert gradient[:, :6].abs().sum() > 0
    twin_layers = [block.attention for block in twin.stack.blocks]
    assert all(not layer.projection.weight.any() for layer in twin_layers)
    model.double()
    assert layers[2].projection.weight.dtype == torch.float64
    assert model(tokens).isfinite().all()


def test_a_model_with_one_matrix_is_saved_and_loaded(tmp_path):
    model, tokens = encoder(sharing="layerwise"), torch.randint(7, (2, 6))
    model.save(tmp_path)
    loaded = Encoder.load(tmp_path)
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0)
    layers = [block.attention for block in loaded.stack.blocks]
    assert all(layer.projection is layers[0].projection for layer in layers)


def test_other_layers_of_a_model_keep_their_mechanism():
    options = {"linformer": {"sharing": "layerwise", "rank": 4, "max_length": 8}}
    names = ["linformer", "softmax", "linformer"]
    config = EncoderConfig(
        7, d_model=8, n_heads=2, n_layers=3, n_classes=2, attention=names, attention_options=options
    )
    first, other, last = (block.attention for block in Encoder(config).stack.blocks)
    assert isinstance(other, SoftmaxAttention)
    assert last.projection is first.projection


def test_a_projection_object_is_shared_by_the_layers_that_are_given_it():
    shared = LinearProjection(4, 8)
    a, b = (LinformerAttention(8, 2, projection=shared, sharing="layerwise") for _ in range(2))
    assert a.projection is b.projection is shared
    assert a.value_projection is None


def test_windows_are_pooled_and_convolved_like_torch_does_it():
    x = normal(2, 12, 3, 5)
    rows = x.permute(0, 2, 3, 1).flatten(0, 2)[:, None]  # [B G W, 1, S]

    def as_heads(y):
        return y.squeeze(1).reshape(2, 3, 5, 4).permute(0, 3, 1, 2)

    pool = nn.functional
    torch.testing.assert_close(MeanPooling(4, 12)(x), as_heads(pool.avg_pool1d(rows, 3)))
    torch.testing.assert_close(MaxPooling(4, 12)(x), as_heads(pool.max_pool1d(rows, 3)))
    kernel = Convolution(4, 12).double()
    expected = pool.conv1d(rows, kernel.weight[None, None], stride=3)
    torch.testing.assert_close(kernel(x), as_heads(expected))
    per_head = Convolution(4, 12, 3).double()
    for g in range(3):
        kernel.weight.data = per_head.weight.data[g]
        torch.testing.assert_close(per_head(x)[:, :, g], kernel(x)[:, :, g])


@pytest.mark.parametrize("kind", [MeanPooling, MaxPooling, Convolution])
def test_a_short_sequence_has_fewer_slots_and_attends_to_no_others(kind):
    projection = kind(4, 12).double()
    x = normal(1, 7, 1, 2)
    assert projection(x).shape == (1, 3, 1, 2)  # windows of 3, 3 and 1
    padding = torch.arange(12)[None] >= 7
    longer = torch.cat([x, torch.zeros(1, 5, 1, 2, dtype=torch.float64)], 1)
    torch.testing.assert_close(projection(longer, padding)[:, :3], projection(x))
    assert projection.empty_slots(padding).tolist() == [[False, False, False, True]]


def test_means_of_fewer_tokens_are_still_means():
    x = normal(1, 7, 1, 2)
    torch.testing.assert_close(MeanPooling(4, 12)(x)[:, 2], x[:, 6])
    torch.testing.assert_close(MaxPooling(4, 12)(-x.abs())[:, 2], -x.abs()[:, 6])


def test_matrices_start_at_the_variance_of_the_authors_code():
    weight = LinearProjection(64, 512).weight
    assert math.isclose(weight.var().item(), 1 / (64 + 512), rel_tol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 17, "max_length": 16}, "rank is 17, but must be between 1 and max_length = 16"),
        ({"rank": 0}, "rank is 0, but must be at least 1"),
        ({"max_length": 0}, "max_length is 0, but must be at least 1"),
        ({"projection": "mean", "rank": 5, "max_length": 16}, "max_length is 16, but must be a multiple of rank = 5"),
        ({"projection": "median"}, "projection is 'median', but must be one of linear, mean, max, convolution"),
        ({"sharing": "all"}, "sharing is 'all', but must be one of none, headwise, key-value, layerwise"),
        ({"projection": LinearProjection(4, 8)}, "sharing is 'headwise', but must be 'layerwise' for a projection object"),
        ({"projection": LinearProjection(4, 8), "sharing": "layerwise", "rank": 5}, "rank is 5, but the projection has 4"),
        ({"projection": LinearProjection(4, 8), "sharing": "layerwise", "max_length": 9}, "max_length is 9, but the projection has 8"),
        ({"projection": LinearProjection(4, 8, 4), "sharing": "layerwise"}, "projection is for 4 heads, but keys and values have 2"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LinformerAttention(8, 2, **options)


def test_the_rank_is_at_most_the_length_by_default():
    assert LinformerAttention(8, 2).projection.rank == 256
    assert LinformerAttention(8, 2, max_length=100).projection.rank == 100


def test_longer_inputs_are_refused_but_longer_queries_are_not():
    module = LinformerAttention(8, 2, rank=4, max_length=8)
    with pytest.raises(ValueError, match="k has length 9, but max_length is 8"):
        module(torch.randn(1, 9, 8))
    assert module(torch.randn(1, 9, 8), torch.randn(1, 8, 8)).shape == (1, 9, 8)


def test_a_projection_prints_its_sizes():
    assert str(LinearProjection(4, 8, 2)) == "LinearProjection(rank=4, max_length=8, n_heads=2)"
    with pytest.raises(NotImplementedError):
        Projection(4, 8)(torch.zeros(1, 8, 1, 1))


def test_layers_share_only_where_they_say_so_and_are_alike():
    shared = {"linformer": {"max_length": 8}}
    config = EncoderConfig(
        9,
        n_classes=2,
        d_model=8,
        n_heads=2,
        n_layers=3,
        attention="linformer",
        attention_options=shared,
        layer_options={"linformer": {"sharing": ["none", "layerwise", "layerwise"]}},
    )
    first, second, third = (block.attention for block in Encoder(config).stack.blocks)
    assert second.projection is third.projection
    assert first.projection is not second.projection
    config.layer_options = {"linformer": {"sharing": ["layerwise"] * 3, "rank": [2, 2, 4]}}
    with pytest.raises(ValueError, match="one layer's projection is LinearProjection"):
        Encoder(config)


def test_the_mean_of_a_long_window_of_half_precision_is_finite():
    x = torch.full((1, 512, 1, 1), 600.0, dtype=torch.float16)
    assert torch.equal(MeanPooling(2, 512)(x), torch.full((1, 2, 1, 1), 600.0, dtype=torch.float16))


@pytest.mark.parametrize("projection", ["mean", "max", "convolution"])
def test_windows_count_valid_tokens_wherever_padding_is(projection):
    module = LinformerAttention(8, 2, rank=4, max_length=8, projection=projection).double()
    x = torch.randn(1, 8, 8, dtype=torch.float64)
    for padding in (torch.arange(8) < 3, torch.arange(8) % 2 == 0):
        found = module(x, key_padding_mask=padding.unsqueeze(0))[:, ~padding]
        torch.testing.assert_close(found, module(x[:, ~padding]))
