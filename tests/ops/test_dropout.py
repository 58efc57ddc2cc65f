"""Dropout: the share that is dropped, scaling, gradients, and where it does nothing."""

import math

import pytest
import torch
from defaults import default_dtype

from unrolled.ops.dropout import Dropout

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_each_number_is_dropped_with_its_probability_and_the_others_are_scaled(p, dtype):
    torch.manual_seed(0)
    n = 100_000
    y = Dropout(p)(torch.ones(n // 100, 100, dtype=dtype))
    scale = torch.ones((), dtype=dtype) / (1 - p)
    assert y.dtype == dtype
    assert ((y == 0) | (y == scale)).all()
    assert abs(int((y == 0).sum()) - n * p) < 5 * math.sqrt(n * p * (1 - p))


def test_neighbours_are_dropped_independently():
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(400, 250)) != 0).double() - 0.5
    for shifted in (kept[:, 1:] * kept[:, :-1], kept[1:] * kept[:-1]):
        assert abs(float(shifted.mean())) < 5 * 0.25 / math.sqrt(shifted.numel())


def test_the_gradient_passes_where_a_number_is_kept():
    torch.manual_seed(0)
    x = torch.randn(30, 7, dtype=torch.float64, requires_grad=True)
    y = Dropout(0.4)(x)
    [gradient] = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.where(y == 0, 0.0, torch.tensor(1 / 0.6).double()))


def test_a_seed_decides_what_is_dropped():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(Dropout(0.5)(torch.ones(50)))
    assert torch.equal(*found)
    assert not torch.equal(found[0], Dropout(0.5)(torch.ones(50)))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_evaluation_and_the_ends_are_torchs(p):
    x = torch.randn(5, 4)
    assert torch.equal(Dropout(p).eval()(x), x)
    if p in (0.0, 1.0):
        assert torch.equal(Dropout(p)(x), torch.nn.Dropout(p)(x))
    with pytest.raises(ValueError, match="dropout probability"):
        Dropout(1.5)


def test_what_torch_makes_by_default_does_not_matter():
    x = torch.ones(40, 50)
    torch.manual_seed(0)
    expected = Dropout(0.3)(x)
    with default_dtype(torch.bfloat16), torch.device("meta"):
        torch.manual_seed(0)
        found = Dropout(0.3)(x)
    assert torch.equal(found, expected)


def test_in_place_it_changes_what_it_is_given():
    x = torch.ones(50)
    assert Dropout(0.5, inplace=True)(x) is x
    assert (x == 0).any()
