"""Feature maps against those of flash-linear-attention. Opt-in: `make test-oracles`.

Its maps order their features in their own way, so kernels are compared: phi(q) . phi(k) for all q and k.
"""

import pytest
import torch
from agreement import assert_agree

from unrolled.ops.feature_maps import T2R, Hedgehog, make_feature_map

pytestmark = pytest.mark.oracles
LIBRARY = "fla-core 0.6.0"


@pytest.fixture
def fla():
    return pytest.importorskip("fla.modules.feature_map")


def tokens(D=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 1, D, generator=generator).requires_grad_() for n in (20, 30)]


def assert_same_kernel(ours, theirs, what):
    q, k = tokens()
    found = ours.phi_q(q)[:, 0] @ ours.phi_k(k)[:, 0].T
    expected = theirs(q)[:, 0] @ theirs(k)[:, 0].T
    assert_agree(found, expected, f"kernel of {what}", library=LIBRARY)
    loss = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    for name, x, y in zip("qk", backward(found * loss, q, k), backward(expected * loss, q, k), strict=True):
        assert_agree(x, y, f"gradient of {name}")


def backward(output, *inputs):
    """Gradients by `backward`, the only way that a map of theirs knows, which recomputes itself."""
    for x in inputs:
        x.grad = None
    output.sum().backward()
    return [x.grad for x in inputs]


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")  # called there without use_reentrant
def test_taylor(fla):
    assert_same_kernel(make_feature_map("taylor", 8), fla.TaylorFeatureMap(8), "Taylor features")


@pytest.mark.parametrize("nu", [1, 4])
def test_dpfp(fla, nu):
    # Before 0.6.0 this library had [relu(x), -relu(x)], which is 0 for a negative x.
    ours, theirs = make_feature_map("dpfp", 8, nu=nu), fla.DPFPFeatureMap(8, nu=nu)
    assert_same_kernel(ours, theirs, f"DPFP-{nu}")


def test_squared_relu(fla):
    assert_same_kernel(make_feature_map("squared_relu", 8), lambda x: fla.ReLUFeatureMap()(x) ** 2, "relu^2")


def test_t2r(fla):
    theirs = fla.T2RFeatureMap(8, dot_dim=12, bias=True)
    ours = T2R(8, 1, feature_dim=12)
    ours.load_state_dict({"weight": theirs.layer.weight[None], "bias": theirs.layer.bias[None]})
    assert_same_kernel(ours, theirs, "T2R")


def test_hedgehog_up_to_its_divisor(fla):
    """Theirs is softmax(2y, -2y) with y = Wx + b: Hedgehog with twice the weights, each row over its sum."""
    theirs, ours = fla.HedgehogFeatureMap(8), Hedgehog(8, 1)
    torch.nn.init.normal_(theirs.layer.weight)
    torch.nn.init.normal_(theirs.layer.bias)
    ours.load_state_dict({"weight": 2 * theirs.layer.weight[None], "bias": 2 * theirs.layer.bias[None]})
    _, x = tokens()
    for side, what in ((ours.phi_q, "queries"), (ours.phi_k, "keys")):
        features = side(x)
        found = features / features.sum(-1, keepdim=True)
        assert_agree(found, theirs(x), f"Hedgehog of {what}, over its sum", library=LIBRARY)


def test_hedgehog_over_its_sum_is_another_kernel(fla):
    """The divisor of a key does not cancel: of two keys in one direction the longer one no longer wins."""
    query, keys = torch.ones(1, 1, 1), torch.tensor([3.0, 4.0]).reshape(2, 1, 1)
    ours, theirs = make_feature_map("hedgehog", 1), fla.HedgehogFeatureMap(1)
    short, long = (ours.phi_k(keys)[:, 0] @ ours.phi_q(query)[0, 0]).tolist()
    assert long / short == pytest.approx(torch.cosh(torch.tensor(5.0)) / torch.cosh(torch.tensor(4.0)))
    short, long = (theirs(keys)[:, 0] @ theirs(query)[0, 0]).tolist()
    assert long / short == pytest.approx(1, abs=1e-4)
