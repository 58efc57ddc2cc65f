"""The base of rotary positions, and how much of each head is rotated: options of every mechanism that rotates."""

import math

import pytest
import torch

from unrolled import attention
from unrolled.attention.linear import LinearAttention
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.positions import rotary


def make(name, **options):
    """A module of 2 heads of 8 numbers in fp64; None if it does not rotate."""
    kind = attention.load(name)
    torch.manual_seed(0)
    causal = kind.supports.causal
    try:
        return kind(16, 2, causal=causal, rotary=True, **options).double().eval()
    except UnsupportedError:
        return None


ROTATING = [name for name in attention.names() if make(name) is not None]


@pytest.mark.parametrize("name", ROTATING)
@torch.no_grad()
def test_every_mechanism_takes_both(name):
    """The first pair has the angle p for every base, so one pair has one output; all pairs have others."""
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    one, same = make(name, rotary_dim=2), make(name, rotary_dim=2, rotary_base=3.0)
    assert torch.equal(one(x), same(x))
    whole, other = make(name), make(name, rotary_base=3.0)
    assert not torch.allclose(whole(x), other(x))
    assert not torch.allclose(whole(x), one(x))


@pytest.mark.parametrize("dim", [None, 6, 2])
def test_only_the_first_numbers_are_rotated(dim):
    x, base = torch.randn(1, 4, 1, 8, dtype=torch.float64), 50.0
    positions, width = torch.tensor([[0, 1, 5, 9]]), dim or 8
    found = rotary(x, positions, base=base, dim=dim)
    for t, position in enumerate(positions[0].tolist()):
        turned = torch.view_as_complex(x[0, t, 0, :width].unflatten(0, (-1, 2)).contiguous())
        turns = [
            math.cos(a) + 1j * math.sin(a)
            for a in (position / base ** (i / width) for i in range(0, width, 2))
        ]
        expected = torch.view_as_real(turned * torch.tensor(turns, dtype=torch.complex128)).flatten()
        torch.testing.assert_close(found[0, t, 0, :width], expected)
        assert torch.equal(found[0, t, 0, width:], x[0, t, 0, width:])


@pytest.mark.parametrize("dim", [0, 3, 10, -2])
def test_pairs_of_the_head_are_rotated(dim):
    with pytest.raises(ValueError, match=f"rotary_dim is {dim}, but must be even, from 2 to head_dim = 8"):
        SoftmaxAttention(16, 2, rotary=True, rotary_dim=dim)


@pytest.mark.parametrize("name", [name for name in ROTATING if name != "linear"])
def test_heads_of_an_odd_width_have_no_pairs(name):
    with pytest.raises(ValueError, match="head_dim is 3, but must be even with rotary and no rotary_dim"):
        make(name, head_dim=3)
    module = make(name, head_dim=3, rotary_dim=2)
    assert module(torch.randn(1, 4, 16, dtype=torch.float64)).shape == (1, 4, 16)


def test_linear_attention_rotates_features():
    """So these must be of an even number, and the head may be of any width."""
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    assert make("linear", head_dim=3, feature_map="dpfp")(x).shape == x.shape
    with pytest.raises(ValueError, match="feature_map has 3 features, but needs an even number"):
        make("linear", head_dim=3)


def test_features_can_be_too_few():
    options = {"feature_map": "t2r", "feature_map_options": {"feature_dim": 4}}
    with pytest.raises(
        ValueError, match="feature_map has 4 features, but needs an even number of at least 8"
    ):
        LinearAttention(16, 2, rotary=True, rotary_dim=8, **options)


@pytest.mark.parametrize("base", [0, -1.0, math.inf])
def test_the_base_is_a_positive_number(base):
    with pytest.raises(ValueError, match="rotary_base is"):
        SoftmaxAttention(16, 2, rotary=True, rotary_base=base)


@pytest.mark.parametrize(("name", "value"), [("rotary_base", 9.0), ("rotary_dim", 4)])
def test_options_of_the_rotation_need_it(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, but rotary is False"):
        SoftmaxAttention(16, 2, **{name: value})


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_there_are_no_weights_between_two_sequences(name):
    module, x = make(name), torch.randn(1, 4, 16, dtype=torch.float64)
    module.causal = False
    with pytest.raises(UnsupportedError, match="rotary positions are not defined between two sequences"):
        module.weights(x, x)
    with pytest.raises(UnsupportedError, match="rotary positions are not defined between two sequences"):
        module(x, x)


@pytest.mark.parametrize("kind", [SoftmaxAttention, LinearAttention])
def test_an_instance_with_positions_says_what_it_cannot_do(kind):
    supports = kind(16, 2, rotary=True).supports
    assert supports.positions
    assert not supports.cross
    assert not supports.single_queries
    assert supports.weights == (kind is SoftmaxAttention)  # those of linear attention do not add up to 1
