"""What is specific to random feature attention: the kernels of directions, the learned scale, the gate."""

import warnings
from functools import partial

import pytest
import torch
from contract_parts import in_two_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from monte_carlo import assert_mean, assert_monte_carlo_rate

from unrolled import attention
from unrolled.attention.rfa import RandomFeatureAttention
from unrolled.attention.rfa.features import RfaMap
from unrolled.attention.rfa.sums import rfa_attention, rfa_attention_reference, signed_rfa_attention
from unrolled.contract import UnsupportedError
from unrolled.ops.positions import rotary
from unrolled.testing import Maker


def feature_map(features="fourier", n_features=16, dim=8, heads=2, rows="orthogonal", seed=0):
    return RfaMap(heads, dim, features, n_features, rows, seed).double()


def inputs(T=9, H=2, D=8, B=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, H, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"gate": True, "n_features": 32}, {"features": "arccos", "rows": "regularised"}],
    ids=["gate", "arccos"],
)
@in_two_parts
def test_its_options_keep_the_contract(options, check_part):
    check_part(Maker(RandomFeatureAttention, options))


@pytest.mark.slow
@given(T=st.integers(1, 80), features=st.sampled_from(["fourier", "arccos"]), gated=st.booleans())
@settings(max_examples=20)
def test_the_parallel_form_is_the_recurrence(T, features, gated):
    """The recurrence of the docstring, written out in a loop, with all gradients."""
    q, k, v = (x.requires_grad_() for x in inputs(T))
    phi = feature_map(features, n_features=64)
    logits = torch.randn(2, T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 2
    logits.requires_grad_(gated)
    S, z, outputs = torch.zeros(2, 2, phi.feature_dim, 8), torch.zeros(2, 2, phi.feature_dim), []
    for t in range(T):
        g = torch.sigmoid(logits[:, t]) if gated else torch.ones(2, 2)
        new = 1 - g if gated else g
        key, query = phi(k)[:, t], phi(q)[:, t]
        S = g[..., None, None] * S + new[..., None, None] * key.unsqueeze(-1) * v[:, t].unsqueeze(-2)
        z = g[..., None] * z + new[..., None] * key
        outputs.append(torch.einsum("bhr,bhrm->bhm", query, S) / (query * z).sum(-1, keepdim=True))
    expected = torch.stack(outputs, 1)
    options = {"gate_logits": logits if gated else None, "causal": True}
    found, state = phi.kernel.attend(phi(q), phi(k), v, **options)
    reference = rfa_attention_reference(phi(q), phi(k), v, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(reference, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((state.kv, state.k_sum), (S, z))
    tensors = [q, k, v, phi.scale] + [logits] * gated
    loss = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    found, expected = (torch.autograd.grad((o * loss).sum(), tensors) for o in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("causal", [True, False])
def test_it_tends_to_the_gaussian_kernel_at_the_monte_carlo_rate(causal):
    """Also with unequal scales, where it is not a softmax."""
    q, k, v = inputs(T=24, H=1, B=1)
    scale = torch.linspace(0.5, 1.2, 8, dtype=torch.float64)
    distances = scale * (unit(q).unsqueeze(2) - unit(k).unsqueeze(1))
    weights = (-distances.square().sum(-1) / 2).exp().squeeze(-1)
    if causal:
        weights = weights.tril()
    expected = torch.einsum("bts,bshm->bthm", weights / weights.sum(-1, keepdim=True), v)

    def estimate(n_features, seed):
        phi = feature_map("fourier", n_features, heads=1, rows="independent", seed=seed)
        phi.scale.data[:] = scale
        return signed_rfa_attention(phi(q), phi(k), v, causal=causal)[0]

    with torch.no_grad():
        assert_monte_carlo_rate(estimate, expected)


@pytest.mark.parametrize("features", ["fourier", "arccos"])
def test_kernels_are_unbiased(features):
    """Of one row each: exp(-|x-y|^2/2), and |x||y| (sin t + (pi - t) cos t) / 2 pi for the angle t."""
    n = 200_000
    x, y = torch.randn(2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    phi = feature_map(features, n, heads=1, rows="independent")
    phi.scale.data[:] = torch.linspace(0.5, 1.5, 8)
    terms = (phi(x) * phi(y)).detach()[0] * n
    x, y = phi.scale.detach()[0] * unit(x[0]), phi.scale.detach()[0] * unit(y[0])
    if features == "fourier":
        assert_mean(terms[:n] + terms[n:], (-(x - y).square().sum() / 2).exp())
    else:
        angle = torch.acos(x @ y / x.norm() / y.norm())
        kernel = x.norm() * y.norm() * (angle.sin() + (torch.pi - angle) * angle.cos()) / (2 * torch.pi)
        assert_mean(terms, kernel)


def test_fourier_features_have_length_one():
    q, _, _ = inputs()
    lengths = feature_map("fourier")(q).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_only_directions_count():
    q, k, _ = inputs()
    phi = feature_map()
    torch.testing.assert_close(phi(q), phi(q * (1 + k.abs().amax(-1, keepdim=True))))


def test_a_vector_whose_square_is_zero_has_a_direction():
    phi, x = feature_map().float(), inputs()[0].float()
    torch.testing.assert_close(phi(x * 1e-30), phi(x))
    torch.testing.assert_close(phi(x * 1e30), phi(x))


def test_a_vector_without_direction_has_features_and_no_gradient():
    x = torch.zeros(1, 2, 8, dtype=torch.float64, requires_grad=True)
    features = feature_map()(x)
    (gradient,) = torch.autograd.grad(features.sum(), x)
    assert features.isfinite().all()
    assert (gradient == 0).all()


def rotation(positions):
    return partial(rotary, positions=torch.tensor(positions))


def test_positions_turn_the_scaled_vectors():
    """So that kernels depend on distances even with unequal scales."""
    q, k, _ = inputs(T=1, H=1, B=1)
    phi = feature_map(n_features=100_000, heads=1, rows="independent")
    phi.scale.data[:] = torch.linspace(0.5, 1.5, 8)
    products = []
    for shift in (0, 1000):
        q_features, k_features = phi(q, rotation([[3 + shift]])), phi(k, rotation([[shift]]))
        terms = (q_features * k_features).detach().flatten() * 100_000
        products.append(terms[:100_000] + terms[100_000:])
        torch.testing.assert_close(phi(q[0], rotation([3 + shift])), q_features[0])  # a step
    assert not torch.equal(*products)
    assert_mean(products[0] - products[1], 0)
    turned, straight = products[0], (phi(q) * phi(k)).detach().sum()
    with pytest.raises(AssertionError):
        assert_mean(turned, straight)


def test_gates_begin_between_090_and_099():
    module = RandomFeatureAttention(16, 4, causal=True, gate=True)
    g = torch.sigmoid(module.read_input(torch.randn(2, 5, 16)).logits)
    torch.testing.assert_close(g[0, 0], 1 - torch.tensor([0.1, 0.1 ** (4 / 3), 0.1 ** (5 / 3), 0.01]))
    torch.testing.assert_close(g, g[0, 0].expand_as(g))


def test_an_open_gate_forgets_everything_and_a_closed_one_nothing_new():
    q, k, v = inputs()
    phi = feature_map("arccos")
    logits = torch.full((2, 9, 2), 40.0, dtype=torch.float64)
    logits[:, 4] = -40.0
    o, _ = rfa_attention(phi(q), phi(k), v, gate_logits=logits, causal=True)
    torch.testing.assert_close(o[:, 4:], v[:, 4:5].expand_as(o[:, 4:]))


@pytest.mark.parametrize("logit", [2.0, 16.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gate_near_1_keeps_what_little_it_lets_in(logit, dtype):
    """Each key weighs 1 - g, 4e-18 at a logit of 40, and so does the divisor; in every form."""
    q, k, v = inputs(T=12)
    phi = feature_map(n_features=256)
    q, k = phi(q).detach(), phi(k).detach()
    logits = torch.full((2, 12, 2), logit, dtype=torch.float64)
    expected = rfa_attention_reference(q, k, v, gate_logits=logits, causal=True)
    q, k, v, logits = (x.to(dtype) for x in (q, k, v, logits))
    found, end = signed_rfa_attention(q, k, v, gate_logits=logits, causal=True)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    state, outputs = None, []
    for part in (slice(0, 1), slice(1, 7), slice(7, 12)):
        options = {"gate_logits": logits[:, part], "causal": True, "state": state}
        o, state = signed_rfa_attention(q[:, part], k[:, part], v[:, part], **options)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), found, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(tuple(state), tuple(end))
    offsets = torch.tensor([0, 4, 12], dtype=torch.int32)
    first = (x[:1] for x in (q, k, v))
    packed, _ = signed_rfa_attention(*first, gate_logits=logits[:1], causal=True, cu_seqlens=offsets)
    torch.testing.assert_close(packed[:, :4], found[:1, :4], rtol=tolerance, atol=tolerance)


def test_a_divisor_is_held_at_a_millionth_of_the_weight_of_the_keys():
    """Of keys at right angles to the query, whose products are 0: also before and after a padded token."""
    q = torch.tensor([1.0, 0, 0, 0]).double().expand(1, 3, 1, 4)
    k = torch.tensor([0, 1.0, 0, 0]).double().expand(1, 3, 1, 4).clone()
    k[:, 0] = torch.tensor([1e-9, 1.0, 0, 0])
    v, logits = torch.ones(1, 3, 1, 1).double(), torch.tensor([16.0, 16.0, 16.0]).double()[None, :, None]
    padding = torch.tensor([[False, True, False]])
    o, state = signed_rfa_attention(q, k, v, gate_logits=logits, causal=True, key_padding_mask=padding)
    new, kept = torch.sigmoid(-logits[0, 0, 0]), torch.sigmoid(logits[0, 0, 0])
    weights = torch.stack([new, new, new * kept + new])  # of the keys so far
    sums = torch.stack([new, new, new * kept]) * 1e-9
    torch.testing.assert_close(o[0, :, 0, 0], sums / (1e-6 * weights))
    torch.testing.assert_close(state.weight, weights[2:, None])


def test_gated_it_is_causal_only():
    module = RandomFeatureAttention(16, 4, causal=True, gate=True)
    assert not module.supports.bidirectional
    assert not module.supports.cross
    assert RandomFeatureAttention.supports.bidirectional
    x = torch.randn(2, 5, 16)
    with pytest.raises(UnsupportedError, match="use gate=False for cross-attention"):
        module(x, x)
    with pytest.raises(UnsupportedError, match="use causal=True or gate=False"):
        RandomFeatureAttention(16, 4, gate=True)


def negative_divisors(scale, n_features):
    """Fraction of divisors that are not positive, over 64 random keys of width 64."""
    signs = []
    for seed in range(10):
        q, k, _ = inputs(T=64, H=1, D=64, B=1, seed=seed)
        phi = feature_map("fourier", n_features, 64, 1, "independent", seed)
        phi.scale.data.fill_(scale)
        signs.append(torch.einsum("bthr,bshr->bt", phi(q), phi(k)) <= 0)
    return float(torch.stack(signs).double().mean())


def test_a_large_scale_makes_divisors_negative():
    """Why there is a warning, and where: none at s = 1, about 1% at s^2 = 3, 10% at s = 2, half at s = 4."""
    with torch.no_grad():
        assert negative_divisors(1.0, 64) == 0
        assert negative_divisors(3**0.5, 64) < 0.03
        assert negative_divisors(2.0, 64) > 0.05
        assert negative_divisors(2.0, 1024) == 0
        assert negative_divisors(4.0, 64) > 0.4


def test_a_large_scale_is_warned_of_once():
    module = RandomFeatureAttention(16, 4, causal=True)
    x = torch.randn(2, 5, 16)
    module(x)
    module.feature_map.scale.data.fill_(2.0)
    with pytest.warns(
        UserWarning, match=r"mean\(scale\^2\) = 4.0, above 3: .* divisors may be near 0 or negative"
    ):
        module(x)
    module(x)
    module.prefill(x, module.init_state(2))
    arccos = RandomFeatureAttention(16, 4, features="arccos")
    arccos.feature_map.scale.data.fill_(2.0)
    arccos(x)


def test_compiled_code_does_not_look_at_the_scale():
    module = RandomFeatureAttention(16, 4)
    module.feature_map.scale.data.fill_(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(module, fullgraph=True, backend="eager")(torch.randn(2, 5, 16))
    assert not module.feature_map._warned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "gaussian"}, "features is 'gaussian', but must be one of fourier, arccos"),
        ({"n_features": 0}, "n_features is 0, but must be at least 1"),
        ({"rows": "identity"}, "rows is 'identity', but must be one of orthogonal, regularised, independent"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        RandomFeatureAttention(16, 4, **options)


@pytest.mark.parametrize("attend", [rfa_attention, signed_rfa_attention])
def test_the_last_queries_of_a_gated_sequence(attend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(2, 5, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    options = {"gate_logits": torch.randn(2, 5, 2, generator=generator, dtype=torch.float64), "causal": True}
    whole, after = attend(q, k, v, **options)
    for T in (0, 1, 2):
        o, end = attend(q[:, 5 - T :], k, v, **options)
        torch.testing.assert_close(o, whole[:, 5 - T :])
        torch.testing.assert_close(end, after)


def test_second_derivatives_are_finite_for_queries_without_a_key():
    module = RandomFeatureAttention(16, 2, causal=True, gate=True).double()
    x = torch.randn(
        1, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    padding = torch.tensor([[True, True, False, False, False, False]])
    (first,) = torch.autograd.grad(module(x, key_padding_mask=padding).sin().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all()


def test_rows_of_rfa_are_those_of_its_seed():
    one, same, other = (attention.load("rfa")(8, 2, seed=seed).feature_map.projection for seed in (3, 3, 4))
    assert torch.equal(one.weight, same.weight)
    assert one.seed == 3
    assert not torch.equal(one.weight, other.weight)
