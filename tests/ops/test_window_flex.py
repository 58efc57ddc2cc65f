"""flex_attention as a form of window attention, as far as a CPU can tell: masks, results, the way back."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from unrolled import window_attention_reference
from unrolled.ops.window import flex as window_flex
from unrolled.ops.window.blocks import Inputs, Options

CPU = torch.device("cpu")
sides = st.one_of(st.sampled_from([-1, 0, 127, 128, 129]), st.integers(0, 500))
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def window_mask(left, right, T, S):
    return window_flex._block_mask(left, right, T, S, CPU).mask_mod


@settings(max_examples=40)
@given(T=st.integers(1, 600), S=st.integers(1, 600), left=sides, right=sides)
def test_blocks_are_those_that_torch_finds_from_the_mask(T, S, left, right):
    found = window_flex._block_mask(left, right, T, S, CPU)
    expected = create_block_mask(found.mask_mod, None, None, T, S, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        number = getattr(found, f"{name}_num_blocks")
        assert torch.equal(number, getattr(expected, f"{name}_num_blocks"))
        listed = torch.arange(getattr(found, f"{name}_indices").shape[-1]) < number.unsqueeze(-1)
        for mask in (found, expected):
            assert (getattr(mask, f"{name}_indices")[listed] < listed.shape[-1]).all()
        assert torch.equal(
            getattr(found, f"{name}_indices")[listed], getattr(expected, f"{name}_indices")[listed]
        )
    assert found.seq_lengths == expected.seq_lengths


@settings(max_examples=40)
@given(T=st.integers(1, 40), S=st.integers(1, 40), left=st.integers(-1, 45), right=st.integers(-1, 45))
def test_the_mask_is_the_window(T, S, left, right):
    found = create_mask(window_mask(left, right, T, S), None, None, T, S, device="cpu")[0, 0]
    left, right = (1000 if side < 0 else side for side in (left, right))
    for i in range(T):
        for j in range(S):
            assert found[i, j] == (-left <= j - (i + S - T) <= right)


def case(T=150, S=150, packed=False, padded=False):
    generator = torch.Generator().manual_seed(0)
    B = 1 if packed else 2
    q = torch.randn(B, T, 4, 16, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(B, S, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    padding = torch.rand(B, S, generator=generator) < 0.4 if padded else None
    if padding is not None:
        padding[0, :80] = True
    cu_seqlens = torch.tensor([0, 40, 40, 41, T], dtype=torch.int32) if packed else None
    return q, k, v, padding, cu_seqlens


CASES = [{}, {"padded": True}, {"packed": True}, {"packed": True, "padded": True}, {"T": 40}, {"T": 300}]


@pytest.mark.parametrize("arguments", CASES, ids=str)
@pytest.mark.parametrize("window", [(20, 0), (5, 9), (-1, -1), (0, 0)])
def test_forward_equals_the_definition(window, arguments):
    q, k, v, padding, cu_seqlens = case(**arguments)
    found = window_flex.forward(Inputs(q, k, v, padding), Options(cu_seqlens, window, 0.3))
    options = {"key_padding_mask": padding, "cu_seqlens": cu_seqlens, "scale": 0.3, "return_lse": True}
    expected = window_attention_reference(q, k, v, window_size=window, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def dense_flex(q, k, v, *, score_mod, block_mask, scale, enable_gqa):
    """What flex_attention computes by its documentation, with a way back; rows of nothing give 0."""
    assert enable_gqa
    (B, H, T, _), S = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, S)), indexing="ij")
    scores = q @ k.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    scores = scores.where(block_mask.mask_mod(b, h, i, j), -torch.inf)
    nothing = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0)
    lse = scores.logsumexp(-1).masked_fill(nothing.squeeze(-1), -torch.inf)
    return (scores.softmax(-1) @ v).masked_fill(nothing, 0), lse


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_autograd_takes_the_gradients_of_flex(arguments, monkeypatch):
    monkeypatch.setattr(window_flex, "_flex", dense_flex)
    q, k, v, padding, cu_seqlens = case(**arguments)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"key_padding_mask": padding, "cu_seqlens": cu_seqlens, "scale": 0.3, "return_lse": True}
    o, lse = window_attention_reference(*leaves, window_size=(20, 3), **options)
    grads = [torch.randn_like(o), torch.randn_like(lse)]
    expected = torch.autograd.grad((o, lse), leaves, grads)
    outputs = window_flex.forward(Inputs(*leaves, padding), Options(cu_seqlens, (20, 3), 0.3))
    found = torch.autograd.grad(outputs, leaves, grads)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.compilers
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_it_can_be_compiled_with_what_surrounds_it(arguments):
    q, k, v, padding, cu_seqlens = case(**arguments)

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        return window_flex.forward(Inputs(q, k, v, padding), Options(cu_seqlens, (5, 9), 0.3))

    with torch.no_grad():
        found, expected = (f(q, k, v) for f in (attend, attend.__wrapped__))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_mask_is_made_once_per_window_and_few_are_kept():
    window_flex._kept_block_mask.cache_clear()
    for length in (*range(1, 40), 39):
        window_flex._kept_block_mask(3, 0, length, length, CPU)
    statistics = window_flex._kept_block_mask.cache_info()
    assert statistics.hits == 1
    assert statistics.currsize == statistics.maxsize == 16


def test_a_mask_of_generation_serves_training_too():
    with torch.inference_mode():
        mask = window_flex._kept_block_mask(3, 0, 40, 40, CPU)
    assert not mask.kv_indices.is_inference()
    assert window_flex._kept_block_mask(3, 0, 40, 40, CPU) is mask


def test_runs_on_cuda_only():
    assert not window_flex.supports(Inputs(*(torch.rand(1, 5, 1, 16) for _ in range(3)), None))
