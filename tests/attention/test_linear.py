"""What is specific to linear attention: its kernel, its feature maps, its rotation."""

import copy

import pytest
import torch
from contract_parts import check_compiled, check_uncompiled

from unrolled.attention.linear import LinearAttention, rotary_linear_attention
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.models import Decoder, DecoderConfig
from unrolled.models.limits import n_positions
from unrolled.ops.feature_maps import FEATURE_MAPS, Elu, Exp, QueryKeyMap, make_feature_map
from unrolled.ops.linear import linear_attention
from unrolled.ops.positions import rotary
from unrolled.testing import Maker, check_forms_agree


def heads(T=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, T, 2, 4, dtype=torch.float64, generator=generator) + 0.1 for _ in range(3)]


OPTIONS = {
    "squared_relu": {},
    "exp": {},
    "dpfp": {"feature_map_options": {"nu": 3}},
    # Away from its zero at q . k = -offset, where sums of large features that cancel lose digits.
    "polynomial": {"feature_map_options": {"offset": 8.0}},
    "taylor": {},
    "cosformer": {"feature_map_options": {"max_length": 1000}},
    "t2r": {},
    "hedgehog": {},
    "hedgehog_softmax": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_other_feature_maps_keep_the_contract(name):
    check_uncompiled(Maker(LinearAttention, {"feature_map": name, **OPTIONS[name]}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_no_more_for_the_backward_pass_than_softmax_attention(dtype):
    kept = {}
    for module in (LinearAttention(64, 4, causal=True), SoftmaxAttention(64, 4, causal=True)):
        x, storages = torch.randn(2, 100, 64, dtype=dtype, requires_grad=True), {}

        def keep(saved, storages=storages):
            storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            module.to(dtype)(x)
        kept[type(module)] = sum(storage.nbytes() for storage in storages.values())
    assert kept[LinearAttention] <= kept[SoftmaxAttention]


@pytest.mark.slow
def test_another_feature_map_has_another_state():
    module, x = LinearAttention(16, 2, causal=True), torch.randn(1, 16)
    module.step(x, module.init_state(1))
    module.feature_map = make_feature_map("taylor", 8, 2, 2)
    y, _ = module.step(x, module.init_state(1))
    assert y.shape == (1, 16)
    with pytest.raises(ValueError, match=r"state.kv is .* but must be torch.float32 \[1, 2, 45, 8\]"):
        module.step(x, LinearAttention(16, 2, causal=True).init_state(1))


@pytest.mark.parametrize("name", ["elu", "polynomial", "cosformer"])
def test_a_norm_of_heads_keeps_the_contract(name):
    check_uncompiled(Maker(LinearAttention, {"feature_map": name, "normalizer": "rms"}))


@pytest.mark.compilers
@pytest.mark.parametrize(
    "options", [{"feature_map": "cosformer"}, {"feature_map": "t2r", "normalizer": "rms"}]
)
def test_learned_and_positional_maps_compile(options):
    check_compiled(Maker(LinearAttention, options))


@pytest.mark.parametrize("normalizer", ["sum", "rms"])
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_steps_in_eager_inference_do_the_same(name, normalizer):
    options = OPTIONS.get(name, {})
    module = LinearAttention(16, 2, causal=True, feature_map=name, normalizer=normalizer, **options)
    x = torch.randn(2, 6, 16)
    with torch.inference_mode():
        state, found = module.init_state(2), []
        for x_t in x.unbind(1):
            y, state = module.step(x_t, state)
            found.append(y)
        expected = copy.deepcopy(module).double()(x.double())
    torch.testing.assert_close(torch.stack(found, 1), expected.float(), rtol=1e-4, atol=1e-4)


def test_every_feature_map_is_tested():
    assert OPTIONS.keys() | {"elu", "relu"} == FEATURE_MAPS.keys()


def by_weights(module, x, causal):
    """The numerators and the sums of the explicit weights, [1,H,T,M] and [1,H,T,1]."""
    q, k, v = (y.unflatten(-1, (2, 4)) for y in module.qkv_proj(x).split(8, dim=-1))
    place = torch.arange(x.shape[1]).expand(x.shape[:2])
    weights = torch.einsum(
        "bthr,bshr->bhts", module.feature_map.phi_q(q, place), module.feature_map.phi_k(k, place)
    )
    weights = weights.tril() if causal else weights
    return weights @ v.transpose(1, 2), weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_the_weights_are_products_of_features(name, causal):
    module = LinearAttention(8, 2, causal=causal, feature_map=name).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    num, den = by_weights(module, x, causal)
    o = num / den.clamp(min=1e-300)  # relu may leave nothing: 0
    torch.testing.assert_close(module(x), module.out_proj(o.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("causal", [True, False])
def test_a_norm_of_heads_takes_the_place_of_the_denominator(causal):
    module = LinearAttention(8, 2, causal=causal, normalizer="rms").double()
    torch.nn.init.normal_(module.head_norm.weight)
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    num, _ = by_weights(module, x, causal)
    o = num / (num.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.head_norm.weight[:, None]
    torch.testing.assert_close(module(x), module.out_proj(o.transpose(1, 2).flatten(2)))


def test_a_norm_of_heads_rotates_the_numerator():
    module = LinearAttention(8, 2, causal=True, normalizer="rms", rotary=True).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    q, k, v = (y.unflatten(-1, (2, 4)) for y in module.qkv_proj(x).split(8, dim=-1))
    place = torch.arange(7)[None]
    q, k = (rotary(module.feature_map.phi(y), place) for y in (q, k))
    num = torch.einsum("bhts,bshm->bthm", torch.einsum("bthr,bshr->bhts", q, k).tril(), v)
    torch.testing.assert_close(module(x), module.out_proj(module.head_norm(num).flatten(2)))


def test_many_keys_do_not_overflow_fp16_without_a_denominator():
    module = LinearAttention(8, 2, feature_map="squared_relu", normalizer="rms").half()
    assert module(20 * torch.ones(1, 5000, 8, dtype=torch.float16)).isfinite().all()


def test_a_model_reads_as_many_tokens_as_cosformer_has_positions():
    options = {"feature_map": "cosformer", "feature_map_options": {"max_length": 20}}
    sizes = {"vocab_size": 5, "d_model": 8, "n_layers": 1, "n_heads": 2, "positions": "none"}
    model = Decoder(DecoderConfig(**sizes, attention="linear", attention_options={"linear": options}))
    tokens, most = torch.zeros(1, 22, dtype=torch.long), n_positions(model)
    assert most == 21
    model(tokens[:, :most])
    with pytest.raises(ValueError, match="positions go up to 21, but must be at most max_length = 20"):
        model(tokens[:, : most + 1])


def test_by_default_cosformer_has_positions_up_to_1024():
    phi, x = make_feature_map("cosformer", 4), torch.ones(1, 1, 4)
    half = phi.phi_k(x, torch.tensor([512]))
    torch.testing.assert_close(half, torch.full_like(half, 0.5**0.5))
    phi.phi_q(x, torch.tensor([1024]))
    with pytest.raises(ValueError, match="positions go up to 1025, but must be at most max_length = 1024"):
        phi.phi_q(x, torch.tensor([1025]))


def test_cosformer_ends_at_its_longest_position():
    x = torch.randn(1, 21, 8, dtype=torch.float64)
    module = LinearAttention(
        8, 2, causal=True, feature_map="cosformer", feature_map_options={"max_length": 20}
    ).double()
    module(x)
    with pytest.raises(ValueError, match="positions go up to 21, but must be at most max_length = 20"):
        module(x[:, :1].expand(-1, 22, -1))
    with torch.no_grad():
        _, state = module.prefill(x, module.init_state(1))
        with pytest.raises(ValueError, match="positions go up to 21"):
            module.step(x[:, 0], state)
        with pytest.raises(ValueError, match="positions go up to 22"):
            module.prefill(x[:, :2], state)


def test_queries_and_keys_may_be_mapped_differently():
    class Mixed(LinearAttention):
        def __init__(self, d_model, n_heads, **shared):
            width = shared.get("head_dim", d_model // n_heads)
            super().__init__(d_model, n_heads, feature_map=QueryKeyMap(Exp(width), Elu(width)), **shared)

    module = Mixed(8, 2, causal=True).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    q, k, v = (y.unflatten(-1, (2, 4)) for y in module.qkv_proj(x).split(8, dim=-1))
    expected = linear_attention(q.exp(), Elu(4).phi(k), v, causal=True)
    torch.testing.assert_close(module(x), module.out_proj(expected.flatten(2)))
    check_forms_agree(Maker(Mixed), Mixed.supports)


def test_a_feature_map_may_be_an_object():
    assert LinearAttention(8, 2, feature_map=Elu(4)).feature_map.feature_dim == 4
    with pytest.raises(ValueError, match="feature_map has head_dim 3, but must have 4"):
        LinearAttention(8, 2, feature_map=Elu(3))
    with pytest.raises(ValueError, match="must be a name or a FeatureMap object"):
        LinearAttention(8, 2, feature_map=Elu)
    with pytest.raises(
        ValueError, match="feature_map has 15 features, but needs an even number of at least 2 with rotary"
    ):
        LinearAttention(8, 2, feature_map="polynomial", rotary=True)
    with pytest.raises(ValueError, match="but must be None for a FeatureMap object"):
        LinearAttention(8, 2, feature_map=Elu(4), feature_map_options={"offset": 2.0})
    with pytest.raises(ValueError, match="normalizer is 'l2', but must be 'sum' or 'rms'"):
        LinearAttention(8, 2, normalizer="l2")


def test_rotation_touches_the_numerator_only():
    q, k, v = heads()
    positions = torch.arange(9).expand(2, 9)
    found, _ = rotary_linear_attention(q, k, v, positions, causal=True)
    earlier = torch.ones(9, 9, dtype=torch.bool).tril()
    turned = torch.einsum("bthr,bshr->bhts", rotary(q, positions), rotary(k, positions)) * earlier
    plain = torch.einsum("bthr,bshr->bhts", q, k) * earlier
    expected = torch.einsum("bhts,bshm->bthm", turned / plain.sum(-1, keepdim=True), v)
    torch.testing.assert_close(found, expected)


def test_steps_use_a_map_that_was_replaced():
    module = LinearAttention(16, 2, causal=True)
    module.feature_map.phi = lambda x: 2 + x.sin()
    x, state, steps = torch.randn(1, 5, 16), module.init_state(1), []
    with torch.no_grad():
        for token in x.unbind(1):
            y, state = module.step(token, state)
            steps.append(y)
        torch.testing.assert_close(torch.stack(steps, 1), module(x))


@pytest.mark.parametrize("name", [name for name in FEATURE_MAPS if name != "cosformer"])
def test_padded_keys_that_are_nan_reach_no_gradient(name):
    phi = make_feature_map(name, 4, 2)
    q, k, v = (x.float() for x in heads(6))
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, :2] = True
    k = k.masked_fill(padding[:, :, None, None], torch.nan).requires_grad_()
    o = linear_attention(q, k, v, key_padding_mask=padding, feature_map=phi)
    found = torch.autograd.grad(o.square().sum(), [k, *phi.parameters()], allow_unused=True)
    assert o.isfinite().all()
    assert all(gradient is None or gradient.isfinite().all() for gradient in found)
