"""Heads scaled to a length: the definition in fp64 on every instruction set, and its derivatives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize, rms_norm, silu

from unrolled.ops.head_scale import scale_heads

TYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {"length": 1.7, "eps": 1e-3}


def inputs(*sizes, dtype=torch.float64, gate_dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(sizes, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    weight = torch.randn(sizes[-2:], generator=generator, dtype=torch.float64)
    return [y.requires_grad_() for y in (x.to(dtype), weight.to(dtype), gate.to(gate_dtype))]


def run(x, weight, gate, **options):
    return scale_heads(x, weight=weight, gate=gate, **OPTIONS | options)


def test_it_is_the_norms_of_torch():
    x, weight, gate = inputs(2, 5, 3, 7)
    torch.testing.assert_close(scale_heads(x, 1.0, 0.0), normalize(x, dim=-1))
    torch.testing.assert_close(scale_heads(silu(x), 2.0, 0.0), scale_heads(x, 2.0, 0.0, activation=True))
    normed = torch.stack([rms_norm(x[:, :, h], [7], weight[h], 1e-3) for h in range(3)], 2)
    torch.testing.assert_close(scale_heads(x, 7**0.5, 7e-3, weight=weight), normed)
    gated = scale_heads(x, 7**0.5, 7e-3, weight=weight, gate=gate)
    torch.testing.assert_close(gated, normed * silu(gate))
    gated = scale_heads(x, 7**0.5, 7e-3, weight=weight, gate=gate, gate_function="sigmoid")
    torch.testing.assert_close(gated, normed * gate.sigmoid())
    gated = scale_heads(x, 7**0.5, 7e-3, weight=weight, gate=gate, gate_first=True)
    normed = torch.stack([rms_norm((x * silu(gate))[:, :, h], [7], weight[h], 1e-3) for h in range(3)], 2)
    torch.testing.assert_close(gated, normed)


sizes = st.tuples(st.integers(1, 2), st.integers(0, 140), st.integers(1, 4), st.integers(1, 40))


@given(sizes, st.booleans(), st.booleans(), st.sampled_from([None, "silu", "sigmoid"]), st.booleans())
def test_the_kernel_and_its_gradients_equal_the_definition(
    sizes, activation, weighted, gate_function, gate_first
):
    exact = inputs(*sizes)
    options = {
        "activation": activation,
        "gate_function": gate_function or "silu",
        "gate_first": gate_first,
    }
    results = []
    for dtype in (torch.float64, torch.float32):
        x, weight, gate = (y.detach().to(dtype).requires_grad_() for y in exact)
        used = {"x": x, "weight": weight if weighted else None, "gate": gate if gate_function else None}
        y = run(**used, **options)
        wanted = [z for z in used.values() if z is not None]
        grad = torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)
        results.append([y, *torch.autograd.grad(y, wanted, grad)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gate_dtype", TYPES)
@pytest.mark.parametrize(("width", "gate_first"), [(15, False), (32, True), (100, True), (100, False)])
def test_16_bit_tensors_are_rounded_once(dtype, gate_dtype, width, gate_first, instruction_set):
    x, weight, gate = inputs(2, 70, 3, width, dtype=dtype, gate_dtype=gate_dtype)
    exact = [y.detach().double().requires_grad_() for y in (x, weight, gate)]
    options = {"activation": True, "gate_first": gate_first}
    y, expected = run(x, weight, gate, **options), run(*exact, **options)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=2e-6)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    found = torch.autograd.grad(y, (x, weight, gate), grad)
    for one, other in zip(found, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        rounding = (
            torch.finfo(one.dtype).eps / 2 * other.abs() + 1e-5 + torch.finfo(one.dtype).smallest_normal
        )
        assert ((one.double() - other).abs() <= rounding).all()


def test_views_and_tensors_of_three_axes():
    x, weight, gate = (y.detach().float() for y in inputs(2, 9, 3, 8))
    expected = run(x, weight, gate)
    views = [torch.cat([x, x], -1)[..., 8:], x.mT.contiguous().mT, torch.complex(-x, -x).conj().imag]
    for view in views:
        assert view.is_neg() or not view.is_contiguous()
        assert torch.equal(run(view, weight, gate), expected)
    assert torch.equal(run(x, torch._neg_view(-weight), gate), expected)
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(expected)
    found, others = (
        torch.autograd.grad(run(leaf, weight, gate), leaf, each) for each in (grad, torch._neg_view(-grad))
    )
    assert torch.equal(*found, *others)
    assert torch.equal(run(x[0], weight, gate[0]), expected[0])
    torch.testing.assert_close(run(x[0, 0], weight, gate[0, 0]), expected[0, 0])


@pytest.mark.parametrize("gate_first", [False, True])
def test_gradients_have_gradients(gate_first):
    x, weight, gate = inputs(1, 3, 2, 4, dtype=torch.float32, gate_dtype=torch.float32)
    exact = [y.detach().double().requires_grad_() for y in (x, weight, gate)]
    found = []
    for tensors in ((x, weight, gate), exact):
        y = run(*tensors, gate_first=gate_first)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(y.square().sum() for y in first), tensors))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_zeros_stay_zeros_with_finite_gradients(instruction_set):
    x = torch.zeros(1, 2, 2, 5, requires_grad=True)
    y = scale_heads(x, 1.0, 1e-24, activation=True)
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


def test_transforms_give_the_same():
    x, weight, gate = (y.detach().float() for y in inputs(2, 9, 3, 8))
    mapped = torch.func.vmap(lambda x, gate: run(x, weight, gate))(x, gate)
    torch.testing.assert_close(mapped, run(x, weight, gate))
