import math

import pytest
import torch
from agreement import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unrolled.recurrent._kronecker import factor_sizes, fuse, matvec
from unrolled.recurrent.kronecker import KroneckerRNN, _unitary

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def product(factors):
    """U itself."""
    U = torch.ones(1, 1, dtype=factors[0].dtype)
    for W in factors:
        U = torch.kron(U, W)
    return U


@given(sizes=SIZES, groups=st.integers(1, 3), batch=st.integers(0, 3))
@settings(max_examples=40)
def test_the_product_is_never_formed_and_yet_it_is_the_product(sizes, groups, batch):
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(groups, n, n, dtype=torch.complex128, generator=generator) for n in sizes]
    x = torch.randn(groups, batch, math.prod(sizes), dtype=torch.complex128, generator=generator)
    for same in (factors, fuse(factors)):
        expected = torch.stack([x[g] @ product([W[g] for W in factors]).T for g in range(groups)])
        error = (matvec(same, x) - expected).abs()
        assert error.numel() == 0 or error.max() <= 1e-13 * max(1.0, expected.abs().max().item())


def test_neighbours_are_fused_up_to_a_bound():
    assert [W.shape[-1] for W in fuse([torch.ones(1, 2, 2)] * 7)] == [16, 8]
    assert [W.shape[-1] for W in fuse([torch.ones(1, n, n) for n in (40, 2, 5, 3)])] == [40, 10, 3]


@given(st.integers(1, 2000))
def test_by_default_the_factors_are_the_primes(size):
    sizes = factor_sizes(size, None)
    assert math.prod(sizes) == size
    assert list(sizes) == sorted(sizes, reverse=True)
    assert size == 1 or all(n > 1 and all(n % p for p in range(2, math.isqrt(n) + 1)) for n in sizes)


@pytest.mark.parametrize("factors", [[6], [2, 3], [3, 2, 1], None])
def test_it_is_its_equation_with_a_complex_matrix(factors):
    module = KroneckerRNN(3, 12, factors=factors).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    U = product([torch.view_as_complex(W) for W in module.factors])
    V, b = (torch.complex(*w.chunk(2)) for w in (module.input_proj.weight, module.input_proj.bias))
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    h, outputs = torch.zeros(2, 6, dtype=torch.complex128), []
    for x_t in x.unbind(1):
        z = h @ U.T + x_t.to(V.dtype) @ V.T + b
        h = torch.polar(torch.tanh(z.abs()), z.angle())
        outputs.append(torch.cat([h.real, h.imag], -1))
    y, expected = module(x), torch.stack(outputs, 1)
    assert_same(y, expected, [x, *module.parameters()], rtol=0)


def test_one_real_factor_is_the_rnn_of_torch():
    ours, theirs = KroneckerRNN(3, 10, factors=[5]).double(), nn.RNN(3, 5, batch_first=True).double()
    with torch.no_grad():
        for parameter in ours.input_proj.parameters():
            parameter[5:] = 0
        ours.factors[0][..., 1] = 0
        theirs.weight_ih_l0.copy_(ours.input_proj.weight[:5])
        theirs.weight_hh_l0.copy_(ours.factors[0][..., 0])
        theirs.bias_ih_l0.copy_(ours.input_proj.bias[:5])
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    real, imag = ours(x).chunk(2, -1)
    torch.testing.assert_close(real, theirs(x)[0], rtol=0, atol=1e-11)
    assert not imag.any()


def test_unitary_factors_make_a_unitary_product_and_no_penalty():
    module = KroneckerRNN(3, 48)
    factors = [torch.view_as_complex(W.detach().double()) for W in module.factors]
    U = product(factors)
    torch.testing.assert_close(U.mH @ U, torch.eye(24, dtype=U.dtype), rtol=0, atol=1e-6)
    h = torch.randn(1, 4, 24, dtype=torch.complex128)
    norms = matvec([W[None] for W in factors], h).norm(dim=-1), h.norm(dim=-1)
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    assert 0 <= module.unitary_penalty() < 1e-10


def test_the_penalty_is_real_and_training_on_it_makes_the_factors_unitary():
    module = KroneckerRNN(3, 24).double()
    with torch.no_grad():
        for W in module.factors:
            W.add_(0.2 * torch.randn_like(W))
    factors = [torch.view_as_complex(W) for W in module.factors]
    expected = sum(
        torch.linalg.matrix_norm(W.mH @ W - torch.eye(len(W), dtype=W.dtype)).square() for W in factors
    )
    penalty = module.unitary_penalty()
    torch.testing.assert_close(penalty, expected, rtol=1e-12, atol=0)
    assert not penalty.is_complex()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        module.unitary_penalty().backward()
        optimizer.step()
    assert module.unitary_penalty() < 1e-6


def test_a_factor_of_two_costs_eight_numbers():
    module = KroneckerRNN(3, 128)
    assert sum(W.numel() for W in module.factors) == 8 * 6


def test_a_state_at_rest_has_a_gradient():
    """|z| has none at 0, where a unit without an input stays."""
    module = KroneckerRNN(3, 4).double()
    nn.init.zeros_(module.input_proj.bias)
    x = torch.zeros(1, 3, 3, dtype=torch.float64, requires_grad=True)
    y = module(x)
    assert not y.any()
    (gradient,) = torch.autograd.grad(y[:, 0].sum(), x)
    torch.testing.assert_close(gradient[0, 0], module.input_proj.weight.sum(0))


def test_large_inputs_keep_their_phase():
    module = KroneckerRNN(1, 2)
    nn.init.ones_(module.input_proj.weight)
    nn.init.zeros_(module.input_proj.bias)
    x = torch.tensor([[[3e19]], [[1e38]]], requires_grad=True)
    torch.testing.assert_close(y := module(x), torch.full((2, 1, 2), 0.5**0.5))
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("size", "factors", "message"),
    [
        (12, 6, "factors is 6, but must be a sequence of whole numbers"),
        (9, None, "hidden_size is 9, but must be even"),
        (12, [2, 2], r"factors is \[2, 2\], which multiply to 4, but must multiply to 6"),
        (12, [], r"factors is \[\], but must be whole numbers"),
        (12, [2.0, 3], r"factors is \[2.0, 3\], but must be whole numbers"),
    ],
)
def test_wrong_sizes_are_named(size, factors, message):
    with pytest.raises(ValueError, match=message):
        KroneckerRNN(3, size, factors=factors)


def test_unitary_matrices_are_drawn_uniformly():
    torch.manual_seed(0)
    traces = torch.stack([_unitary(2).diagonal().sum() for _ in range(2000)])
    assert traces.mean().abs() < 0.1  # 4 standard errors
