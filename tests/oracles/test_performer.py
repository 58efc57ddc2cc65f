"""Performer against performer-pytorch and pytorch-fast-transformers, with the same random rows.

The first adds a constant to every exponential (`eps`), ours does not; with eps = 0 both compute one function. Its
causal form leaks, which a test shows; the second one's, in fp32 and without a stabiliser, does not.
"""

from functools import partial

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree

from unrolled.attention.performer import FavorMap, favor_attention
from unrolled.ops.random_features import Projection

LIBRARY = "performer-pytorch 1.1.4"


@pytest.fixture
def theirs():
    pytest.importorskip("performer_pytorch")
    return pytest.importorskip("performer_pytorch.performer_pytorch")


def random_inputs(T=100, H=2, D=16, std=0.5):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, T, H, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return [x.requires_grad_() for x in (std * q, std * k, v)]


def by_heads(x):
    return x.transpose(1, 2)


assert_same = partial(assert_all_agree, tolerance=1e-12, library=LIBRARY)


@pytest.mark.parametrize("rows", ["orthogonal", "regularised"])
def test_bidirectional_softmax_features(theirs, rows):
    inputs = random_inputs()
    q, k, v = map(by_heads, inputs)
    phi = FavorMap(16, "positive", Projection(1, 48, 16, rows, seed=0)).double()
    W = phi.projection.weight[0]
    features = [
        theirs.softmax_kernel(x, projection_matrix=W, is_query=is_query, eps=0.0)
        for x, is_query in ((q, True), (k, False))
    ]
    expected = by_heads(theirs.linear_attention(*features, v))
    assert_same(favor_attention(*inputs, phi)[0], expected, inputs, f"FAVOR+, {rows} rows")


def test_bidirectional_relu_features(theirs):
    """Its generalised kernel scales by D^(-1/4) too; eps is 0.001 in both."""
    inputs = random_inputs()
    q, k, v = map(by_heads, inputs)
    phi = FavorMap(16, "relu", Projection(1, 48, 16, "orthogonal", seed=0)).double()
    attention = theirs.FastAttention(16, nb_features=48, generalized_attention=True)
    attention.projection_matrix = phi.projection.weight[0]
    expected = by_heads(attention(q, k, v))
    found, _ = favor_attention(inputs[0] * 16**-0.25, inputs[1] * 16**-0.25, inputs[2], phi)
    assert_same(found, expected, inputs, "generalised features (ReLU)")


def test_its_module_differs_by_its_constant_only(theirs):
    """FastAttention as it comes, with eps = 1e-4, which at this size is worth less than a hundredth of the output."""
    q, k, v = (x.detach() for x in random_inputs())
    phi = FavorMap(16, "positive", Projection(1, 48, 16, "orthogonal", seed=0)).double()
    attention = theirs.FastAttention(16, nb_features=48)
    attention.projection_matrix = phi.projection.weight[0]
    expected = by_heads(attention(*map(by_heads, (q, k, v))))
    found, _ = favor_attention(q, k, v, phi)
    assert_agree(found, expected, "FastAttention, eps = 1e-4", tolerance=0.01, library=LIBRARY)


def test_its_causal_attention_sees_the_future(theirs):
    """The smallest example: heads of width 1, one row w = 1, three tokens, values 0, 1, 0.

    The second output is the weight of the second key among the first two, e^-1.5 / (e^0.5 + e^-1.5) = 0.119.
    Theirs becomes about 0.5 once the *third* key is loud: the maximum over all keys is subtracted from each, so that
    the features of the first two sink below their eps.
    """
    attention = theirs.FastAttention(1, nb_features=1, causal=True)
    attention.projection_matrix = torch.ones(1, 1, dtype=torch.float64)
    projection = Projection(1, 1, 1, "independent", seed=0).double()
    projection.weight.fill_(1)
    phi = FavorMap(1, "positive", projection)
    q, v = (
        torch.ones(1, 3, 1, 1, dtype=torch.float64),
        torch.tensor([0.0, 1.0, 0.0]).double().view(1, 3, 1, 1),
    )
    second = {}
    for loud in (0.0, 20.0):
        k = torch.tensor([1.0, -1.0, loud], dtype=torch.float64).view(1, 3, 1, 1)
        ours, _ = favor_attention(q, k, v, phi, causal=True)
        second[loud] = float(attention(*map(by_heads, (q, k, v)))[0, 0, 1, 0]), float(ours[0, 1, 0, 0])
    assert second[0.0][0] == pytest.approx(0.119, abs=1e-3)
    assert second[20.0][0] == pytest.approx(0.5, abs=1e-2)
    assert second[0.0][1] == second[20.0][1] == pytest.approx(0.1192029, abs=1e-7)


def test_causal_hyperbolic_features():
    attention = pytest.importorskip("fast_transformers.attention")
    masking = pytest.importorskip("fast_transformers.masking")
    maps = pytest.importorskip("fast_transformers.feature_maps")
    inputs = [x.detach().float().requires_grad_() for x in random_inputs()]
    phi = FavorMap(16, "hyperbolic", Projection(1, 24, 16, "orthogonal", seed=0))
    theirs = attention.CausalLinearAttention(
        16, maps.Favor.factory(n_dims=48, deterministic_eval=True)
    ).eval()
    theirs.feature_map.omega = phi.projection.weight[0].T.contiguous()
    lengths = masking.LengthMask(torch.tensor([100, 100]))
    expected = theirs(*inputs, masking.TriangularCausalMask(100), lengths, lengths)
    found, _ = favor_attention(*inputs, phi, causal=True)
    library, what = "pytorch-fast-transformers 0.4.0", "FAVOR+, hyperbolic, causal"
    assert_all_agree(found, expected, inputs, what, library=library)
