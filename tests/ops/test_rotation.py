"""Rotation of pairs: complex numbers of torch in fp64, on every instruction set, and its derivatives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unrolled.ops.positions import rotary
from unrolled.ops.rotation import rotate_pairs

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(B, T, H, D, pairs, shared=False, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, H, D, generator=generator, dtype=torch.float64).to(dtype)
    angles = torch.randn(1 if shared else B, T, pairs, generator=generator, dtype=torch.float64) * 4
    return x, angles


def turned(x, angles):
    """Multiply complex numbers, in fp64."""
    pairs = torch.view_as_complex(x[..., : 2 * angles.shape[-1]].double().unflatten(-1, (-1, 2)).contiguous())
    y = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    return torch.cat([torch.view_as_real(y).flatten(-2), x[..., 2 * angles.shape[-1] :].double()], dim=-1)


def rotated(x, angles):
    return rotate_pairs(x, angles.cos(), angles.sin())


sizes = st.tuples(
    st.integers(1, 3), st.integers(0, 200), st.integers(1, 4), st.integers(1, 40), st.integers(0, 20)
).filter(lambda x: 2 * x[4] <= x[3])


@given(sizes, st.booleans())
def test_pairs_are_multiplied_as_complex_numbers(sizes, shared):
    x, angles = inputs(*sizes, shared)
    torch.testing.assert_close(rotated(x, angles), turned(x, angles))
    torch.testing.assert_close(rotated(x.float(), angles).double(), turned(x, angles), atol=2e-6, rtol=0)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("D", "pairs"), [(2, 1), (15, 4), (64, 32), (100, 17)])
def test_the_kernel_rounds_once(dtype, D, pairs, instruction_set):
    x, angles = inputs(2, 150, 3, D, pairs, dtype=dtype)  # more tokens than one task of the kernel has
    found = rotated(x, angles)
    assert found.dtype == dtype
    assert_rounded_once(found, turned(x, angles))


def assert_rounded_once(found, exact):
    dtype = found.dtype
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(torch.float32).eps * 10
    rounding += torch.finfo(dtype).smallest_normal if dtype == torch.float16 else 0
    assert ((found.double() - exact).abs() <= rounding).all()


def test_numbers_after_the_pairs_are_copied_whatever_they_are(instruction_set):
    x, angles = inputs(1, 70, 2, 20, 5, dtype=torch.float32)
    x[..., 10:] = torch.tensor([torch.inf, torch.nan]).repeat(5)
    y = rotated(x, angles)
    assert y[..., :10].isfinite().all()
    assert torch.equal(y[..., 10:].nan_to_num(7.0), x[..., 10:].nan_to_num(7.0))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_view_of_a_projection_and_a_transposed_one(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, angles = inputs(2, 2000, 3, 8, 4, dtype=torch.float32)
        for view in (torch.cat([x, x], dim=-1)[..., 8:], x.transpose(-1, -2).contiguous().transpose(-1, -2)):
            assert not view.is_contiguous()
            assert torch.equal(rotated(view, angles), rotated(x, angles))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_is_the_rotation_back_and_has_one_itself(shared):
    x, angles = inputs(2, 7, 3, 6, 2, shared, dtype=torch.float32)
    x.requires_grad_()
    g = torch.randn_like(x).requires_grad_()
    [d_x] = torch.autograd.grad(rotated(x, angles), x, g, create_graph=True)
    torch.testing.assert_close(d_x.double(), turned(g, -angles), atol=1e-6, rtol=0)
    h = torch.randn_like(x)
    [d_g] = torch.autograd.grad(d_x, g, h)
    torch.testing.assert_close(d_g.double(), turned(h, angles), atol=1e-6, rtol=0)


def test_transforms_and_views_of_negated_memory():
    x, angles = inputs(2, 7, 3, 6, 3, dtype=torch.float32)
    mapped = torch.func.vmap(lambda x, angles: rotated(x.unsqueeze(0), angles.unsqueeze(0)).squeeze(0))(
        x, angles
    )
    torch.testing.assert_close(mapped.double(), turned(x, angles), atol=2e-6, rtol=0)
    y, pull_back = torch.func.vjp(lambda x: rotated(x, angles), x)
    torch.testing.assert_close(pull_back(y)[0], x)
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    assert torch.equal(rotated(negated, angles), rotated(-x, angles))
    cos, sin = angles.cos(), torch._neg_view(-angles.sin())
    assert sin.is_neg()
    assert torch.equal(rotate_pairs(x, cos, sin), rotate_pairs(x, cos, angles.sin()))


def test_positions_that_a_batch_shares_give_what_each_row_alone_gives():
    x, _ = inputs(3, 9, 2, 8, 4, dtype=torch.float32)
    shared = torch.arange(9).expand(3, 9)
    assert torch.equal(rotary(x, shared), rotary(x, shared.contiguous()))
    one_by_one = torch.stack(
        [rotary(x[:, t], shared[:, t]) for t in range(9)], dim=1
    )  # a token has no axis T
    torch.testing.assert_close(rotary(x, shared), one_by_one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_single_token_is_rounded_once_too(dtype):
    x, angles = inputs(64, 1, 4, 32, 16, dtype=dtype)
    assert_rounded_once(rotated(x[:, 0], angles[:, 0]), turned(x, angles)[:, 0])
