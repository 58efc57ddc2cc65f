"""Feature maps: their kernels, their signs, and that half precision and pickling leave them whole."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unrolled.ops.feature_maps import FEATURE_MAPS, Elu, Polynomial, make_feature_map


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_widths_and_pickling(name):
    phi = pickle.loads(pickle.dumps(make_feature_map(name, 6)))
    x = torch.randn(2, 5, 3, 6)
    assert phi.phi_q(x).shape == phi.phi_k(x).shape == (2, 5, 3, phi.feature_dim)
    assert phi.phi_q(x.bfloat16()).dtype == torch.float32
    assert phi.phi_k(x.double()).dtype == torch.float64


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_of_fp16_neither_overflow_nor_vanish(name):
    phi = make_feature_map(name, 2)
    assert phi.phi_k(torch.tensor([300.0, 20.0], dtype=torch.float16)).isfinite().all()
    if name == "elu":
        assert (phi.phi_q(torch.tensor([-20.0, -30.0], dtype=torch.float16)) > 0).all()


def test_relus_are_what_they_are_called():
    x = torch.tensor([-2.0, 0.0, 0.5, 3.0])
    assert make_feature_map("relu", 4).phi_q(x).tolist() == [0, 0, 0.5, 3]
    assert make_feature_map("squared_relu", 4).phi_q(x).tolist() == [0, 0, 0.25, 9]


@pytest.mark.parametrize("name", ["elu", "relu", "squared_relu"])
def test_features_are_not_negative(name):
    assert (make_feature_map(name, 8).phi(torch.randn(100, 8) * 10) >= 0).all()


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


def test_elu_gradients_are_finite_for_large_inputs():
    x = torch.tensor([1e4, -1e4], requires_grad=True)  # exp(1e4) in the branch not taken would be inf * 0
    Elu(2).phi(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]


@given(D=st.integers(1, 7), offset=st.floats(0, 3), seed=st.integers(0, 99))
def test_polynomial_features_have_the_polynomial_kernel(D, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(4, D, generator=generator, dtype=torch.float64) for _ in range(2))
    phi = Polynomial(D, offset).double()
    torch.testing.assert_close(phi.phi_q(q) @ phi.phi_k(k).T, (q @ k.T + offset) ** 2)


def test_wrong_names_and_widths_are_refused():
    with pytest.raises(ValueError, match="feature_map is 'tanh', but must be one of elu, relu"):
        make_feature_map("tanh", 4)
    with pytest.raises(ValueError, match="head_dim is 0"):
        Elu(0)
    with pytest.raises(ValueError, match="offset is -1"):
        Polynomial(4, -1)
