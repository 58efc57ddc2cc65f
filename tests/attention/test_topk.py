"""What is specific to top-k attention: which keys are kept, and what memory that takes."""

import pytest
import torch
from agreement import assert_same, normal
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.attention import topk
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.attention.topk import TopkAttention, topk_attention, topk_reference
from unrolled.ops.softmax import softmax_attention
from unrolled.testing import Maker, check_half_precision
from unrolled.training.memory import PeakBytes


def heads(T, S, H=4, G=2, B=2, seed=0):
    shapes = (B, T, H, 4), (B, S, G, 4), (B, S, G, 3)
    return [normal(*shape, seed=3 * seed + i).requires_grad_() for i, shape in enumerate(shapes)]


def defined(q, k, v, n_keys, allowed, bias=0.0):
    """The definition, from all scores: those below the k-th largest that may be read are masked."""
    H, D = q.shape[2:]
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / D**0.5 + bias
    scores = scores.masked_fill(~allowed, -torch.inf)
    lowest = scores.sort(-1, descending=True).values[..., : min(n_keys, k.shape[1])][..., -1:]
    read = allowed & (scores >= lowest)
    nothing = ~read.any(-1, keepdim=True)
    weights = (
        scores.masked_fill(~read, -torch.inf).masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    )
    return torch.einsum("bhts,bshm->bthm", weights, v)


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 8)),
    causal=st.booleans(),
    padded=st.booleans(),
    masked=st.sampled_from([None, "heads", "all", "added"]),
    rows=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_each_query_keeps_its_largest_scores(sizes, causal, padded, masked, rows, seed):
    T, S, n_keys = sizes
    q, k, v = inputs = heads(T, S, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    allowed, bias, options = torch.ones(2, 4, T, S, dtype=torch.bool), 0.0, {}
    if causal:
        allowed = allowed.tril(S - T)
    if padded:
        options["key_padding_mask"] = torch.rand(2, S, generator=generator) < 0.4
        allowed = allowed & ~options["key_padding_mask"][:, None, None]
    if masked == "added":
        bias = options["attn_mask"] = normal(4, T, S, seed=seed).masked_fill(
            torch.rand(4, T, S, generator=generator) < 0.2, -torch.inf
        )
        allowed = allowed & (bias > -torch.inf)
    elif masked:
        shape = (2, 4, T, S) if masked == "heads" else (1, S)
        options["attn_mask"] = torch.rand(*shape, generator=generator) < 0.7
        allowed = allowed & options["attn_mask"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "SCORES", 2 * 4 * S * rows)  # so many queries at a time
        found = topk_attention(q, k, v, n_keys, causal=causal, **options)
        expected = defined(q, k, v, n_keys, allowed, bias)
        assert_same(found, expected, inputs, rtol=1e-12, atol=1e-12)


def test_a_mask_may_be_wider_than_the_inputs():
    q, k, v = (x.detach().float() for x in heads(5, 5))
    mask = normal(5, 5)
    assert mask.dtype == torch.float64
    found = topk_attention(q, k, v, 2, attn_mask=mask)
    exact = topk_attention(q.double(), k.double(), v.double(), 2, attn_mask=mask)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.float())


def test_the_reference_of_one_head_is_the_same():
    q, k, v = heads(7, 9, H=1, G=1, B=1)
    found = topk_attention(q, k, v, 3)[0, :, 0]
    torch.testing.assert_close(found, topk_reference(q[0, :, 0], k[0, :, 0], v[0, :, 0], 3))


@pytest.mark.slow
def test_few_keys_keep_the_contract():
    make = Maker(TopkAttention, {"n_keys": 3})
    check_uncompiled(make, check_half_precision)  # slow, and done with 32 keys


@pytest.mark.compilers
def test_few_keys_compile():
    module, x = TopkAttention(8, 2, n_keys=3, causal=True).double(), normal(1, 9, 8).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (compiled, module))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_with_as_many_keys_kept_as_there_are_it_is_softmax_attention(causal):
    module = TopkAttention(8, 2, n_keys=9, causal=causal, rotary=True).double()
    softmax = SoftmaxAttention(8, 2, causal=causal, rotary=True).double()
    softmax.load_state_dict(module.state_dict())
    x = normal(2, 9, 8)
    torch.testing.assert_close(module(x), softmax(x))
    longer = normal(2, 10, 8)
    assert (module(longer) - softmax(longer)).abs().max() > 1e-4


def test_scores_are_not_kept_for_the_gradient():
    kept = []

    def note(x):
        kept.append(x.numel())
        return x

    q, k, v = heads(40, 40, H=2, G=2, B=1)
    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        patch.setattr(topk, "SCORES", 2 * 40 * 4)
        topk_attention(q, k, v, 3).sum().backward()
        sparse, kept[:] = max(kept), []
        softmax_attention(q, k, v, backend="math")
    assert max(kept) >= 2 * 40 * 40  # of softmax attention, all of them
    assert sparse < 2 * 40 * 40


def test_what_is_hidden_is_not_kept_for_the_gradient():
    """Kept as booleans, the hidden keys of each row would take B T (T + rows) / 2 bytes."""
    B, T, rows = 2, 400, 20
    q, k, v = (x.detach().requires_grad_() for x in heads(T, T, H=1, G=1, B=B))
    padding = torch.arange(T) >= torch.tensor([[T], [T - 30]])
    with pytest.MonkeyPatch.context() as patch, PeakBytes() as memory:
        patch.setattr(topk, "SCORES", B * T * rows)
        o = topk_attention(q, k, v, 1, causal=True, key_padding_mask=padding)
        kept = memory.live
    rows_kept = B * T * (4 + 4 + 3 + 2 * 3 + 1 + 1) * 8  # q, k and v, o twice, the choice and room for others
    assert kept < rows_kept < B * T * (T + rows) // 2
    o.sum().backward()


@pytest.mark.parametrize(("n_keys", "expected"), [(0, "at least 1"), (None, "an integer")])
def test_wrong_numbers_of_keys_are_named(n_keys, expected):
    with pytest.raises(ValueError, match=f"n_keys is {n_keys}, but must be {expected}"):
        TopkAttention(8, 2, n_keys=n_keys)


def test_it_has_gradients_under_transforms():
    q, k, v = (normal(1, 9, 2, 4, seed=seed) for seed in range(3))

    def loss(q):
        return topk_attention(q, k, v, 3, causal=True).square().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)


def test_a_key_that_a_mask_of_numbers_hides_may_be_nan():
    q, k, v = (torch.randn(1, 6, 2, 4) for _ in range(3))
    expected = topk_attention(q, k[:, :5], v[:, :5], 3)
    k[:, 5] = torch.nan
    hidden = torch.tensor([0.0, 0, 0, 0, 0, -torch.inf])
    torch.testing.assert_close(topk_attention(q, k, v, 3, attn_mask=hidden), expected)
