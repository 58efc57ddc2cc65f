"""What makes linear attention itself, beyond the contract: its kernel, its feature maps, its rotation."""

import pytest
import torch

from unrolled.attention.linear import LinearAttention, rotary_linear_attention
from unrolled.ops.feature_maps import FEATURE_MAPS, Elu
from unrolled.ops.positions import rotary
from unrolled.testing import check_mechanism


def heads(T=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, T, 2, 4, dtype=torch.float64, generator=generator) + 0.1 for _ in range(3)]


@pytest.mark.parametrize("name", ["relu", "squared_relu"])
def test_other_feature_maps_keep_the_contract(name):
    check_mechanism("linear", feature_map=name)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_the_weights_are_products_of_features(name):
    module = LinearAttention(8, 2, feature_map=name).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in module.qkv_proj(x).split(8, dim=-1))
    weights = module.feature_map.phi_q(q) @ module.feature_map.phi_k(k).mT
    o = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)) @ v  # relu may leave nothing: 0
    torch.testing.assert_close(module(x), module.out_proj(o.transpose(1, 2).flatten(2)))


def test_a_feature_map_may_be_an_object():
    assert LinearAttention(8, 2, feature_map=Elu(4)).feature_map.feature_dim == 4
    with pytest.raises(ValueError, match="feature_map takes heads 3 wide, but they are 4"):
        LinearAttention(8, 2, feature_map=Elu(3))
    with pytest.raises(ValueError, match="must be a name or a FeatureMap object"):
        LinearAttention(8, 2, feature_map=Elu)
    with pytest.raises(ValueError, match="rotary wants an even number of features, but the map gives 15"):
        LinearAttention(8, 2, feature_map="polynomial", rotary=True)


def test_rotation_touches_the_numerator_only():
    q, k, v = heads()
    positions = torch.arange(9).expand(2, 9)
    found, _ = rotary_linear_attention(q, k, v, positions, causal=True)
    earlier = torch.ones(9, 9, dtype=torch.bool).tril()
    turned = torch.einsum("bthr,bshr->bhts", rotary(q, positions), rotary(k, positions)) * earlier
    plain = torch.einsum("bthr,bshr->bhts", q, k) * earlier
    wanted = torch.einsum("bhts,bshm->bthm", turned / plain.sum(-1, keepdim=True), v)
    torch.testing.assert_close(found, wanted)


def test_rotary_attention_depends_on_distances_only():
    q, k, v = heads()
    positions = torch.arange(9).expand(2, 9)
    here, _ = rotary_linear_attention(q, k, v, positions, causal=True)
    there, _ = rotary_linear_attention(q, k, v, positions + 1000, causal=True)
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_the_state_does_not_grow():
    module = LinearAttention(16, 4, causal=True).eval()
    with torch.inference_mode():
        _, short = module.prefill(torch.randn(1, 1, 16), module.init_state(1))
        _, long = module.prefill(torch.randn(1, 1000, 16), module.init_state(1))
    assert [x.shape for x in short] == [x.shape for x in long]
    assert long.position.item() == 1000
