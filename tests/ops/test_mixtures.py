"""Mixtures of two tensors: the kernel against plain operations."""

import exactness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.ops.mixtures import mixtures

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.missing())),
    pytest.mark.usefixtures("poisoned_memory"),
]


def inputs(*shape, n=3, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, other = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return [x, other, torch.rand(n, shape[-1], generator=generator).to(dtype)]


def results(given, *, exact=False, backend="native"):
    """The mixtures and the gradients of a weighted sum of them."""
    generator, dtype = torch.Generator().manual_seed(1), given[0].dtype
    given = [(x.double() if exact else x).clone().requires_grad_() for x in given]
    with prefer(backend):
        mixed = mixtures(*given)
    weights = [torch.randn(y.shape, generator=generator).to(dtype) for y in mixed]
    sum((y * w.to(y.dtype)).sum() for y, w in zip(mixed, weights, strict=True)).backward()
    return [*(y.detach() for y in mixed), *(x.grad for x in given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 700, 33), (2, 16), (5, 1, 130)])
def test_the_kernel_is_as_exact_as_plain_operations(shape, dtype, instruction_set):
    exactness.assert_as_exact(
        ["y", "y", "y", "dx", "dother", "dmu"],
        lambda seed: inputs(*shape, dtype=dtype, seed=seed),
        2,
        definition=lambda given, exact: results(given, exact=exact, backend="plain"),
        ours=lambda given, exact: results(given, exact=exact),
        others=[lambda given, exact: results(given, exact=exact, backend="plain")],
        least=1,
    )


@settings(max_examples=20)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 40), st.integers(1, 7))
def test_every_shape(sizes, channels, n):
    given = inputs(*sizes, channels, n=n)
    for ours, theirs in zip(results(given), results(given, backend="plain"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_any_strides_and_threads(threads):
    x, other, mu = inputs(6, 400, 32)
    strided = [
        x.transpose(0, 1).contiguous().transpose(0, 1),
        other[..., ::2].repeat(1, 1, 2),
        mu.T.contiguous().T,
    ]
    expected = results([y.contiguous() for y in strided])
    for n in (1, 3):
        threads(n)
        for ours, theirs in zip(results(strided), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_they_are_what_a_linear_layer_reads(dtype):
    x, other, mu = (y.requires_grad_() for y in inputs(2, 50, 24))
    with torch.autocast("cpu", dtype):
        mixed = mixtures(x, other, mu)
        sum(y.square().sum() for y in mixed).backward()
    assert [y.dtype for y in mixed] == [dtype] * 3
    with prefer("plain"):
        for ours, theirs in zip(mixed, mixtures(x, other, mu), strict=True):
            assert torch.equal(ours, theirs.to(dtype))
    assert x.grad.dtype == other.grad.dtype == mu.grad.dtype == torch.float32


def test_second_derivatives_are_those_of_plain_operations():
    found = []
    for backend in ("native", "plain"):
        given = [y.requires_grad_() for y in inputs(2, 5, 6)]
        with prefer(backend):
            total = sum(y.square().sum() for y in mixtures(*given))
            first = torch.autograd.grad(total, given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-5)  # sums of numbers up to 100


def test_one_mixture_may_be_unused():
    x, other, mu = (y.requires_grad_() for y in inputs(2, 5, 6))
    mixtures(x, other, mu)[1].sum().backward()
    torch.testing.assert_close(x.grad, (1 - mu[1]).expand_as(x).detach())
    assert not mu.grad[[0, 2]].any()


def test_others_run_in_plain_operations():
    given = [y.double() for y in inputs(2, 5, 6)]
    expected = mixtures(*given)
    mapped = torch.func.vmap(lambda x, other: mixtures(x, other, given[2]))(*given[:2])
    torch.testing.assert_close(mapped, expected)
    traced = torch.compile(mixtures, fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(*given), expected)
