"""Feature maps: their kernels, their signs, and that half precision and pickling leave them whole."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import linear_attention
from unrolled.ops.feature_maps import FEATURE_MAPS, Elu, Polynomial, QueryKeyMap, make_feature_map


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_widths_and_pickling(name):
    phi = pickle.loads(pickle.dumps(make_feature_map(name, 6, 4, 2)))
    q, k, place = torch.randn(2, 5, 4, 6), torch.randn(2, 5, 2, 6), torch.arange(5).expand(2, 5)
    assert phi.phi_q(q, place).shape == (2, 5, 4, phi.feature_dim)
    assert phi.phi_k(k, place).shape == (2, 5, 2, phi.feature_dim)
    torch.testing.assert_close(phi.phi_q(q[:, 3], place[:, 3]), phi.phi_q(q, place)[:, 3])  # as in a step
    assert phi.phi_q(q.bfloat16(), place).dtype == torch.float32
    assert phi.phi_k(k.double(), place).dtype == torch.float64


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_of_fp16_neither_overflow_nor_vanish(name):
    phi, place = make_feature_map(name, 2), torch.tensor([0])
    assert phi.phi_q(torch.tensor([[[300.0, 20.0]]], dtype=torch.float16), place).isfinite().all()
    assert phi.phi_k(torch.tensor([[[300.0, 20.0]]], dtype=torch.float16), place).isfinite().all()
    if name in ("elu", "exp", "hedgehog"):
        assert (phi.phi_k(torch.tensor([[[-20.0, -30.0]]], dtype=torch.float16), place) > 0).all()


def test_relus_are_what_they_are_called():
    x = torch.tensor([-2.0, 0.0, 0.5, 3.0])
    assert make_feature_map("relu", 4).phi_q(x).tolist() == [0, 0, 0.5, 3]
    assert make_feature_map("squared_relu", 4).phi_q(x).tolist() == [0, 0, 0.25, 9]


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS.keys() - {"polynomial", "taylor"}))
def test_features_are_not_negative(name):
    phi, x, place = make_feature_map(name, 8), torch.randn(100, 1, 8) * 10, torch.arange(100)
    assert (phi.phi_q(x, place) >= 0).all()
    assert (phi.phi_k(x, place) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_elu_is_positive_where_the_literal_formula_is_zero(dtype):
    x = torch.tensor(
        [-16.0 if dtype == torch.float16 else -80.0, -9.0, 0.0, 3.0], dtype=dtype
    ).requires_grad_()
    features = Elu(4).phi(x)
    assert (features > 0).all()
    torch.testing.assert_close(features, torch.where(x > 0, x + 1, x.exp()))
    features.sum().backward()
    assert (x.grad > 0).all()


@pytest.mark.parametrize("name", ["exp", "hedgehog"])
@pytest.mark.parametrize("size", [20, 50, 100, 1000])
@pytest.mark.parametrize("backend", ["plain", None])
def test_exponentials_of_large_inputs_have_gradients(name, size, backend):
    """In fp32 as in fp64. Without limits, gradients of features overflow, and some outputs are 0."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 40, 16, 2, 8, dtype=torch.float64)

    def results(dtype):
        phi = make_feature_map(name, 8, 2).to(dtype)
        inputs = [(size * q).to(dtype), (size * k).to(dtype), v.to(dtype)]
        inputs = [x.requires_grad_() for x in inputs]
        y = linear_attention(*inputs, causal=True, feature_map=phi, backend=backend)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]

    for found, exact in zip(results(torch.float32), results(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * size * float(exact.abs().max()))


def test_elu_gradients_are_finite_for_large_inputs():
    x = torch.tensor([1e4, -1e4], requires_grad=True)  # exp(1e4) in the branch not taken would be inf * 0
    Elu(2).phi(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]


@settings(max_examples=25)
@given(D=st.integers(1, 7), offset=st.floats(0, 3), seed=st.integers(0, 99))
def test_polynomial_features_have_the_polynomial_kernel(D, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(4, D, generator=generator, dtype=torch.float64) for _ in range(2))
    phi = Polynomial(D, offset).double()
    torch.testing.assert_close(phi.phi_q(q) @ phi.phi_k(k).T, (q @ k.T + offset) ** 2)


@settings(max_examples=25)
@given(D=st.integers(1, 7), size=st.floats(0.1, 3), seed=st.integers(0, 99))
def test_taylor_features_have_the_series_of_exp_up_to_its_square(D, size, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (size * torch.randn(4, D, generator=generator, dtype=torch.float64) for _ in range(2))
    phi, s = make_feature_map("taylor", D), q @ k.T / D**0.5
    kernel = phi.phi_q(q) @ phi.phi_k(k).T
    torch.testing.assert_close(kernel, 1 + s + s**2 / 2)
    assert (kernel >= 0.5 - 1e-12).all()
    assert ((s.exp() - kernel).abs() <= s.abs() ** 3 * s.clamp(min=0).exp() / 6 + 1e-12).all()


def test_dpfp_multiplies_neighbours():
    x = torch.tensor([2.0, -3.0])  # u = [2, 0, 0, 3]
    assert make_feature_map("dpfp", 2, nu=1).phi(x).tolist() == [6, 0, 0, 0]
    assert make_feature_map("dpfp", 2, nu=3).phi(x).tolist() == [6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6]


def test_dpfp_keeps_what_is_negative():
    # A known mistake is u = [relu(x), -relu(x)], which gives every negative vector the features 0.
    assert (make_feature_map("dpfp", 4).phi(-torch.ones(4)) != 0).any()


@settings(max_examples=25)
@given(i=st.integers(0, 50), j=st.integers(0, 50), seed=st.integers(0, 99))
def test_cosformer_weighs_by_the_cosine_of_the_distance(i, j, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    phi = make_feature_map("cosformer", 4, max_length=50)
    found = (phi.phi_q(q, torch.tensor([i])) * phi.phi_k(k, torch.tensor([j]))).sum()
    expected = (q.relu() * k.relu()).sum() * math.cos(math.pi * (i - j) / 100)
    torch.testing.assert_close(found, expected)


def normalised(phi, q, k, **positions):
    weights = phi.phi_q(q[:, None], **positions)[:, 0] @ phi.phi_k(k[:, None], **positions)[:, 0].T
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", ["exp", "hedgehog"])
def test_a_factor_per_query_cancels(name):
    q, k = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    q.requires_grad_()
    sides = [q, k] if name == "exp" else [torch.cat([x, -x], -1) for x in (q, k)]
    literal = sides[0].exp() @ sides[1].exp().T
    expected = literal / literal.sum(-1, keepdim=True)
    found = normalised(make_feature_map(name, 3), q, k)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((x * x).sum(), q)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["exp", "hedgehog"])
def test_exponentials_of_large_inputs_are_finite_with_finite_gradients(name):
    x = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    phi = make_feature_map(name, 3)
    features = torch.cat([phi.phi_q(x), phi.phi_k(x)])
    assert features.isfinite().all()
    assert features.sum().isfinite()
    assert torch.autograd.grad(features.sum(), x)[0].isfinite().all()


def test_hedgehog_begins_with_the_identity():
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    plain, halves = (make_feature_map(name, 3, 4) for name in ("hedgehog", "hedgehog_softmax"))
    torch.testing.assert_close(plain.phi_k(x), torch.cat([x, -x], -1).exp())
    for side in (halves.phi_q, halves.phi_k):
        torch.testing.assert_close(side(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))


@pytest.mark.parametrize("name", ["t2r", "hedgehog", "hedgehog_softmax"])
def test_each_head_has_weights_of_its_own(name):
    phi = make_feature_map(name, 3, 4, 2).double()
    for side, H in (("queries", 4), ("keys", 2)):
        one = getattr(phi, side)
        torch.nn.init.normal_(one.weight)
        torch.nn.init.normal_(one.bias)
        x = torch.randn(5, H, 3, dtype=torch.float64)
        alone = type(one)(3, 1).double()
        for h in range(H):
            alone.load_state_dict({"weight": one.weight[h : h + 1], "bias": one.bias[h : h + 1]})
            torch.testing.assert_close(one.phi_k(x)[:, h], alone.phi_k(x[:, h : h + 1])[:, 0])
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    layer = torch.einsum("bhd,hrd->bhr", x, phi.keys.weight) + phi.keys.bias
    torch.testing.assert_close(phi.keys.layer(x), layer)
    with pytest.raises(ValueError, match=r"x has shape \[5, 2, 3\], but this map has weights for 4 heads"):
        phi.phi_q(x)


def test_learned_maps_ignore_autocast():
    phi, x = make_feature_map("t2r", 8, 1), torch.randn(5, 1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = phi.phi_q(x)
    assert torch.equal(found, phi.phi_q(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_feature_map("tanh", 4), "feature_map is 'tanh', but must be one of elu, relu"),
        (lambda: Elu(0), "head_dim is 0"),
        (lambda: Polynomial(4, -1), "offset is -1"),
        (lambda: make_feature_map("dpfp", 4, nu=8), "nu is 8, but must be from 1 to 2 head_dim - 1 = 7"),
        (lambda: make_feature_map("cosformer", 4, max_length=0), "max_length is 0"),
        (lambda: make_feature_map("cosformer", 4).phi_q(torch.zeros(1, 1, 4)), "positions is None, but must be those"),
        (lambda: make_feature_map("t2r", 4, 0), "n_heads is 0, but must be at least 1"),
        (lambda: QueryKeyMap(Elu(4), Polynomial(4)), "map of queries goes from 4 to 4, but that of keys from 4 to 15"),
    ],
)  # fmt: skip
def test_wrong_names_and_widths_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_t2r_starts_like_a_linear_layer():
    torch.manual_seed(0)
    for phi in make_feature_map("t2r", 64, 4).children():
        for parameter in (phi.weight, phi.bias):
            assert 0.95 / 8 < parameter.abs().max() <= 1 / 8
