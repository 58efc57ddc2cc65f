"""What is specific to Nyströmformer: its landmarks, its inverse, and where it is exact."""

import numpy as np
import pytest
import torch
from agreement import assert_same, normal
from contract_parts import in_two_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unrolled import attention
from unrolled.attention import nystromformer
from unrolled.attention.nystromformer import (
    NystromformerAttention,
    iterative_pinv,
    landmarks,
    nystrom_attention,
    nystrom_reference,
    pinv_residual,
    segment_means,
)
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.softmax import softmax_attention
from unrolled.testing import Maker


def heads(T, S, H=2, G=2, B=2, seed=0):
    shapes = (B, T, H, 4), (B, S, G, 4), (B, S, G, 3)
    return [normal(*shape, seed=3 * seed + i).requires_grad_() for i, shape in enumerate(shapes)]


def softmax_matrix(m, std=1.0, width=16):
    return (std * normal(m, width) @ normal(m, width, seed=1).mT / width**0.5).softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"n_landmarks": 2}, {"n_landmarks": 3, "conv_width": 5}],
)
@in_two_parts
def test_it_keeps_the_contract_with_fewer_landmarks_than_tokens(options, check_part):
    check_part(Maker(NystromformerAttention, options))


class Sharper(NystromformerAttention):
    """One whose landmarks differ: with initial weights the rows of A are nearly equal, and A^+ amplifies rounding."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.startswith(("q", "k")):
                    weight *= 3


@in_two_parts
def test_it_keeps_the_contract_with_an_exact_inverse(check_part):
    check_part(Maker(Sharper, {"n_landmarks": 2, "iterations": None}))


@pytest.mark.parametrize("std", [0.3, 1.0, 2.0])
def test_where_the_landmarks_are_the_tokens_the_limit_is_softmax_attention(std):
    q, k, v = (std * normal(24, 8, seed=i) for i in range(3))
    expected = (q @ k.mT / 8**0.5).softmax(-1) @ v
    torch.testing.assert_close(nystrom_reference(q, k, v, 24, iterations=40), expected, rtol=1e-8, atol=1e-8)
    rough = nystrom_reference(q, k, v, 24, iterations=6)
    assert (rough - expected).abs().max() > 1e-4  # six steps are not the limit


def test_tokens_that_repeat_need_no_more_landmarks_than_there_are_different_ones():
    q, k, v = (normal(2, 8, 2, 4, seed=i).repeat_interleave(5, dim=1) for i in range(3))
    found = nystrom_attention(q, k, v, n_landmarks=8, iterations=40, self_attention=True)
    torch.testing.assert_close(found, softmax_attention(q, k, v), rtol=1e-8, atol=1e-8)
    exact = nystrom_attention(q, k, v, n_landmarks=8, iterations=None, self_attention=True)
    torch.testing.assert_close(exact, softmax_attention(q, k, v), rtol=1e-11, atol=1e-11)


def test_without_iterations_the_inverse_is_that_of_moore_and_penrose():
    """By the formula F A^+ B V of the survey, with numpy's inverse; also of landmarks that are all the same."""
    q, k, v = heads(9, 11, G=2)
    with torch.no_grad():
        k[1] = k[1, :1]  # whose A has rank 1
    found = nystrom_attention(q, k, v, n_landmarks=3, iterations=None)
    assert torch.autograd.grad(found.sum(), k)[0].isfinite().all()
    for b, h in ((0, 0), (0, 1), (1, 0)):
        x, y, z = (t[b, :, h].detach().numpy() for t in (q, k, v))
        means = [np.stack([part.mean(0) for part in np.array_split(t, 3)]) for t in (x, y)]
        first, middle, last = (
            np.exp(s / 2) / np.exp(s / 2).sum(-1, keepdims=True)
            for s in (x @ means[1].T, means[0] @ means[1].T, means[0] @ y.T)
        )
        expected = first @ np.linalg.pinv(middle) @ last @ z
        np.testing.assert_allclose(found[b, :, h].detach(), expected, rtol=1e-9, atol=1e-11)


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
    grouped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_its_equations_of_two_segmentations(sizes, grouped, seed):
    m, more_queries, more_keys = sizes
    q, k, v = inputs = heads(m + more_queries, m + more_keys, H=4, G=2 if grouped else 4, seed=seed)
    found = nystrom_attention(q, k, v, n_landmarks=m)
    heads_alone = [
        nystrom_reference(q[b, :, h], k[b, :, h * k.shape[2] // 4], v[b, :, h * k.shape[2] // 4], m)
        for b in range(2)
        for h in range(4)
    ]
    expected = torch.stack(heads_alone).unflatten(0, (2, 4)).transpose(1, 2)
    assert_same(found, expected, inputs)


@settings(max_examples=60)
@given(N=st.integers(1, 20), m=st.integers(1, 8), density=st.floats(0, 1), seed=st.integers(0, 99))
def test_segments_are_those_of_the_valid_tokens(N, m, density, seed):
    x = normal(3, N, 2, 2, seed=seed)
    padding = torch.rand(3, N, generator=torch.Generator().manual_seed(seed)) > density
    found = segment_means(x.masked_fill(padding[..., None, None], 0), m, padding)
    for row, keep, means in zip(x, ~padding, found, strict=True):
        tokens = row[keep]
        n = len(tokens)
        used = min(m, n)
        for s in range(m):
            of_segment = [i for i in range(n) if i * used // n == s]
            expected = tokens[of_segment].mean(0) if of_segment else torch.zeros(2, 2, dtype=torch.float64)
            torch.testing.assert_close(means[s], expected)
    torch.testing.assert_close(segment_means(x, m), segment_means(x, m, torch.zeros(3, N, dtype=torch.bool)))


def test_a_batch_may_mix_rows_that_need_landmarks_with_rows_that_do_not():
    q, k, v = inputs = heads(9, 9, B=4)
    lengths = torch.tensor([9, 4, 3, 0])
    padding = torch.arange(9) >= lengths[:, None]
    found = nystrom_attention(q, k, v, n_landmarks=4, key_padding_mask=padding, self_attention=True)
    softmax = softmax_attention(q, k, v, key_padding_mask=padding)
    alone = nystrom_attention(*(x[:1] for x in inputs), n_landmarks=4, self_attention=True)
    torch.testing.assert_close(found[0], alone[0], rtol=1e-12, atol=1e-12)
    valid = ~padding
    valid[0] = False
    torch.testing.assert_close(found[valid], softmax[valid], rtol=1e-12, atol=1e-12)
    assert (found[0] - softmax[0]).abs().max() > 1e-3  # an approximation it is
    assert not found[3].any()


@pytest.mark.parametrize(("T", "S"), [(4, 9), (9, 4), (4, 4)])
def test_few_queries_or_few_keys_get_softmax_attention(T, S):
    q, k, v = heads(T, S)
    torch.testing.assert_close(nystrom_attention(q, k, v, n_landmarks=4), softmax_attention(q, k, v))


def test_queries_of_another_sequence_are_not_masked():
    module = NystromformerAttention(8, 2, n_landmarks=2).double()
    x, memory = normal(1, 6, 8), normal(1, 6, 8, seed=1)
    padding = torch.tensor([[False, False, False, False, True, True]])
    found = module(x, memory, key_padding_mask=padding)
    torch.testing.assert_close(found, module(x, memory[:, :4]))
    other = x.clone()
    other[:, 5] += 1  # a query in a column where the memory is padded
    assert (module(other, memory, key_padding_mask=padding)[:, :5] - found[:, :5]).abs().max() > 1e-6


def test_a_step_of_the_iteration_cubes_the_error():
    """1 - x' = (1 - x)^3 (4 - x) / 4 for an eigenvalue x of A Z."""
    x = torch.linspace(0.05, 1, 7, dtype=torch.float64)
    once = iterative_pinv(torch.eye(7, dtype=torch.float64), 1, start=x.diag())
    torch.testing.assert_close(1 - once.diagonal(), (1 - x) ** 3 * (4 - x) / 4)


def test_the_inverse_is_the_inverse():
    a = softmax_matrix(16)
    residuals = [pinv_residual(a, iterative_pinv(a, n)).item() for n in (2, 6, 12, 40)]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[1] < 0.1
    assert residuals[-1] < 1e-10
    torch.testing.assert_close(iterative_pinv(a, 40), torch.linalg.pinv(a), rtol=1e-6, atol=1e-6)


def test_a_matrix_without_inverse_gets_its_pseudo_inverse():
    a = softmax_matrix(4).repeat_interleave(2, dim=0).repeat_interleave(2, dim=1) / 2
    torch.testing.assert_close(iterative_pinv(a, 40), torch.linalg.pinv(a), rtol=1e-6, atol=1e-6)


def test_without_iterations_a_row_that_is_not_finite_changes_no_other():
    module = NystromformerAttention(16, 2, n_landmarks=3, iterations=None).double()
    x = torch.randn(2, 20, 16, dtype=torch.double)
    expected = module(x)
    x[0] = torch.nan
    found = module(x)
    assert torch.equal(found[1], expected[1])
    assert found[0].isnan().all()


def test_each_matrix_starts_from_norms_of_its_own():
    a = torch.stack([softmax_matrix(8, std) for std in (0.1, 1.0, 20.0)])
    together = iterative_pinv(a)
    for one, found in zip(a, together, strict=True):
        torch.testing.assert_close(found, iterative_pinv(one), rtol=1e-12, atol=1e-12)


def test_rounding_errors_grow_after_the_last_iteration_that_is_allowed():
    a = softmax_matrix(64, std=9.0).float()
    allowed = iterative_pinv(a, 20)
    twice = iterative_pinv(a, 20, start=allowed)
    assert pinv_residual(a.double(), allowed.double()) < 1e-3
    assert pinv_residual(a.double(), twice.double()) > 1e-3
    with pytest.raises(ValueError, match="iterations is 21, but must be between 1 and 20, since rounding"):
        iterative_pinv(a, 21)
    with pytest.raises(ValueError, match=r"a is torch.bfloat16, but must be torch.float32 or torch.float64"):
        iterative_pinv(a.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_inverse_is_fp32_whatever_surrounds_it(dtype, monkeypatch):
    seen = []

    def watched(a, iterations):
        z = iterative_pinv(a, iterations)
        seen.append((a.dtype, z.dtype, (a @ z).dtype))
        return z

    monkeypatch.setattr(nystromformer, "iterative_pinv", watched)
    module = NystromformerAttention(8, 2, n_landmarks=2).to(dtype)
    x = torch.randn(1, 6, 8, dtype=dtype)
    module(x)
    if dtype == torch.float32:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(x)
    assert set(seen) == {(torch.float32,) * 3}


def test_convergence_says_what_the_iterations_reach():
    x = 3 * normal(3, 12, 8)
    padding = torch.arange(12) >= torch.tensor([[12], [7], [4]])
    few, many = (NystromformerAttention(8, 2, n_landmarks=4, iterations=n).double() for n in (2, 20))
    many.load_state_dict(few.state_dict())
    before, after = (module.convergence(x, key_padding_mask=padding) for module in (few, many))
    assert before.shape == (3, 2)
    assert (after[:2] < before[:2]).all()
    assert not after[2].any()  # four tokens are their own landmarks
    torch.testing.assert_close(few.convergence(x[1:2, :7]), before[1:2])
    q, k = (y.unflatten(-1, (2, 4))[0, :, 0] for y in few.qkv_proj(x[:1]).split(8, dim=-1)[:2])
    a = (segment_means(q[None], 4)[0] @ segment_means(k[None], 4)[0].mT / 2).softmax(-1)
    torch.testing.assert_close(before[0, 0], pinv_residual(a, iterative_pinv(a, 2)))
    with pytest.raises(ValueError, match=r"x has shape \[12, 8\], but must be \[B, T, 8\]"):
        few.convergence(x[0])


def test_rotary_queries_and_keys_are_rotated_before_the_means():
    module = NystromformerAttention(8, 2, n_landmarks=2, rotary=True).double()
    softmax = SoftmaxAttention(8, 2, rotary=True).double()
    softmax.load_state_dict(module.state_dict())
    x = normal(1, 9, 8)
    torch.testing.assert_close(module(x[:, :2]), softmax(x[:, :2]))
    swapped = x[:, [1, 0, *range(2, 9)]]
    assert (module(swapped)[:, 2:] - module(x)[:, 2:]).abs().max() > 1e-6  # same segment, other positions
    assert module.convergence(x).shape == (1, 2)


def test_the_skip_convolves_the_values_of_neighbouring_valid_tokens():
    plain = NystromformerAttention(8, 2, n_landmarks=2).double()
    module = NystromformerAttention(8, 2, n_landmarks=2, conv_width=3).double()
    module.load_state_dict(plain.state_dict(), strict=False)
    nn.init.eye_(module.out_proj.weight)
    nn.init.eye_(plain.out_proj.weight)
    x = normal(1, 6, 8)
    padding = torch.tensor([[True, False, False, True, False, False]])
    keep = ~padding[0]
    skip = module(x, key_padding_mask=padding) - plain(x, key_padding_mask=padding)
    v = module.qkv_proj(x).split(8, dim=-1)[2][0, keep].unflatten(-1, (2, 4))
    v = torch.cat([v.new_zeros(1, 2, 4), v, v.new_zeros(1, 2, 4)])
    kernel = module.conv.weight.flatten(1).unsqueeze(-1)  # [H,3,1]
    expected = torch.stack([(kernel * v[i : i + 3].transpose(0, 1)).sum(1) for i in range(4)])
    torch.testing.assert_close(skip[0, keep], expected.flatten(1))


def test_the_skip_has_no_place_between_two_sequences():
    module = NystromformerAttention(8, 2, conv_width=3)
    assert not module.supports.cross
    assert NystromformerAttention.supports.cross
    with pytest.raises(UnsupportedError, match="does not support cross-attention"):
        module(torch.zeros(1, 3, 8), torch.zeros(1, 4, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_landmarks": 0}, "n_landmarks is 0, but must be at least 1"),
        ({"iterations": 0}, "iterations is 0, but must be at least 1"),
        ({"iterations": 21}, "iterations is 21, but must be between 1 and 20"),
        ({"conv_width": 4}, "conv_width is 4, but must be odd"),
        ({"conv_width": -1}, "conv_width is -1, but must be at least 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        NystromformerAttention(8, 2, **options)


def test_convergence_is_that_of_rotated_queries_and_keys():
    layer, x = (
        attention.load("nystromformer")(8, 2, n_landmarks=4, iterations=2, rotary=True),
        torch.randn(2, 9, 8),
    )
    _, _, a = landmarks(*layer.rotated(layer.heads_of(layer.project(x), x)), 4, None, None)
    torch.testing.assert_close(layer.convergence(x), pinv_residual(a, iterative_pinv(a, 2)))
