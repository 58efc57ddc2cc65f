"""Similarity attention: its kernels by their definitions, and the mechanisms that it is equal to."""

import math

import pytest
import torch
from agreement import normal
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.attention.linear import LinearAttention
from unrolled.attention.similarity import Kernel, Rbf, SimilarityAttention, similarity_attention
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.ops.masks import causal_mask, packed_mask
from unrolled.testing import Maker, check_no_future_leak, check_nothing_to_attend, check_state_is_a_value

KERNELS = {
    "exp": lambda q, k: math.exp(q @ k / len(q) ** 0.5),
    "rbf": lambda q, k: math.exp(-(q - k) @ (q - k) / len(q) ** 0.5),
    "polynomial": lambda q, k: (q @ k + 1) ** 2,
    "linear": lambda q, k: q @ k,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"similarity": "rbf"}, {"similarity": "polynomial"}, {"symmetric": True}]
)
def test_it_keeps_the_contract(options):
    """Compilation takes the same code as by default."""
    check_uncompiled(Maker(SimilarityAttention, options))


def test_a_kernel_of_either_sign_leaks_nothing():
    # It keeps what is exact of the contract. Sums of weights that nearly vanish give gradients in the millions,
    # whose digits depend on the order of summation.
    make = Maker(SimilarityAttention, {"similarity": "linear"})
    for check in (check_no_future_leak, check_nothing_to_attend, check_state_is_a_value):
        check(make, make.supports)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25)
@given(T=st.integers(1, 4), extra=st.integers(0, 3), G=st.integers(1, 2), seed=st.integers(0, 99))
def test_it_is_a_weighted_mean(name, T, extra, G, seed):
    q, k, v = (
        normal(1, T, 2, 3, seed=seed),
        normal(1, T + extra, G, 3, seed=seed + 1),
        normal(1, T + extra, G, 5),
    )
    found = SimilarityAttention(2, 2, similarity=name).similarity
    o = similarity_attention(q, k, v, found, causal=True)
    for i in range(T):
        for h in range(2):
            g = h * G // 2
            weights = [KERNELS[name](q[0, i, h], k[0, j, g]) for j in range(i + extra + 1)]
            expected = sum(w * v[0, j, g] for j, w in enumerate(weights)) / sum(weights)
            torch.testing.assert_close(o[0, i, h], expected, rtol=1e-6, atol=1e-6)


def twins(kind, options, **shared):
    """Similarity attention and another module, with the same weights."""
    one, other = SimilarityAttention(8, 2, **options, **shared).double(), kind(8, 2, **shared).double()
    other.load_state_dict(one.state_dict())
    return one, other


def unrolled(module, x, prefix, padding):
    y, state = module.prefill(x[:, :prefix], module.init_state(len(x)), key_padding_mask=padding)
    outputs = [y]
    for x_t in x[:, prefix:].unbind(1):
        y, state = module.step(x_t, state)
        outputs.append(y[:, None])
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("rotary", [False, True])
def test_exp_is_softmax_attention(rotary):
    x = normal(3, 7, 8)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, [0, 1]] = padding[1, [3, 6]] = True
    log_kernel = normal(3, 2, 7, 7).masked_fill(normal(7, 7, seed=1) > 1, -math.inf)
    for causal in (True, False):
        ours, softmax = twins(
            SoftmaxAttention, {}, causal=causal, rotary=rotary, n_kv_heads=1, head_dim=6, value_dim=5
        )
        for masks in (
            {},
            {"key_padding_mask": padding},
            {"attn_mask": log_kernel},
            {"attn_mask": log_kernel > 0, "key_padding_mask": padding},
        ):
            torch.testing.assert_close(ours(x, **masks), softmax(x, **masks))
        cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
        torch.testing.assert_close(ours(x[:1], cu_seqlens=cu_seqlens), softmax(x[:1], cu_seqlens=cu_seqlens))
        if not rotary:
            torch.testing.assert_close(ours(x[:, :2], x), softmax(x[:, :2], x))
    ours, softmax = twins(SoftmaxAttention, {}, causal=True, rotary=rotary)
    found, expected = (unrolled(module, x, 4, padding[:, :4]) for module in (ours, softmax))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_a_polynomial_is_linear_attention_with_its_features(causal):
    x = normal(2, 7, 8).requires_grad_()
    shared = {"causal": causal, "n_kv_heads": 1}
    ours = SimilarityAttention(8, 2, similarity="polynomial", similarity_options={"offset": 2.0}, **shared)
    linear = LinearAttention(8, 2, feature_map="polynomial", feature_map_options={"offset": 2.0}, **shared)
    linear.load_state_dict(ours.double().state_dict())
    found, expected = ours(x), linear.double()(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((y * y).sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_floating_point_mask_multiplies_by_the_kernel_of_which_it_is_the_logarithm():
    q, k, v = normal(1, 6, 2, 3), normal(1, 6, 2, 3, seed=1), normal(1, 6, 2, 4, seed=2)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).double().abs()
    for name in ("rbf", "polynomial"):
        similarity = SimilarityAttention(2, 2, similarity=name).similarity
        content = similarity(q, k)
        content = content.exponent.exp() if isinstance(content, Kernel) else content
        weights = content * (-distance / 2).exp()
        expected = weights @ v.transpose(1, 2) / weights.sum(-1, keepdim=True)
        found = similarity_attention(q, k, v, similarity, attn_mask=-distance / 2)
        torch.testing.assert_close(found, expected.transpose(1, 2))


def test_the_mask_learns():
    mask = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~causal_mask(3, 3), -math.inf).requires_grad_()
    q = normal(1, 3, 1, 2)
    o = similarity_attention(q, q, q, lambda q, k: Kernel(q.new_ones(()), (q @ k.mT).mean()), attn_mask=mask)
    (gradient,) = torch.autograd.grad(o.square().sum(), mask)
    assert gradient.isfinite().all()
    assert (gradient.triu(1) == 0).all()
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", ["exp", "rbf"])
def test_large_exponents_neither_overflow_nor_vanish(name):
    q, k = 100 * normal(1, 5, 1, 4), 100 * normal(1, 5, 1, 4, seed=1)
    similarity = SimilarityAttention(2, 2, similarity=name).similarity
    o = similarity_attention(q.float(), k.float(), torch.ones(1, 5, 1, 1), similarity)
    torch.testing.assert_close(o, torch.ones_like(o))


@pytest.mark.parametrize("offset", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("masks", ["none", "causal", "left padding", "packed"])
def test_an_offset_that_all_queries_and_keys_share_costs_rbf_no_digits(offset, masks):
    """Against differences written out in fp64; fp32 has rounded the inputs before either sees them."""
    q, k = ((offset + normal(1, 12, 2, 4, seed=seed)).float() for seed in (0, 1))
    v, allowed, options = normal(1, 12, 2, 3, seed=2), torch.ones(12, 12, dtype=torch.bool), {}
    if masks == "causal":
        allowed, options = causal_mask(12, 12), {"causal": True}
    elif masks == "left padding":
        padding = torch.arange(12)[None] < 5
        allowed, options = ~padding.expand(12, 12), {"key_padding_mask": padding}
    elif masks == "packed":  # the second sequence lies elsewhere
        q[:, 5:] -= 2 * offset
        k[:, 5:] -= 2 * offset
        options = {"cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32)}
        allowed = packed_mask(options["cu_seqlens"], 12)
    distance = (q.double()[:, :, None] - k.double()[:, None]).square().sum(-1)
    scores = (-distance / 4**0.5).masked_fill(~allowed[None, :, :, None], -math.inf)
    expected = torch.einsum("bijh,bjhm->bihm", scores.softmax(2), v)
    found = similarity_attention(q, k, v.float(), Rbf(), **options).double()
    assert (found - expected).norm() / expected.norm() < 2e-6


def test_weights_that_add_up_to_zero_give_zero():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, -1.0]).reshape(1, 2, 1, 1)
    similarity = SimilarityAttention(2, 2, similarity="linear").similarity
    assert similarity_attention(q, k, k, similarity).item() == 0


@pytest.mark.parametrize("causal", [True, False])
def test_symmetric_attention_ties_queries_to_keys(causal):
    symmetric = SimilarityAttention(8, 2, causal=causal, symmetric=True, value_dim=3).double()
    plain = SimilarityAttention(8, 2, causal=causal, value_dim=3).double()
    weights = symmetric.state_dict()
    for name in ("qkv_proj.weight", "qkv_proj.bias"):
        weights[name] = torch.cat([weights[name][:8], weights[name]])
    plain.load_state_dict(weights)
    x = normal(2, 5, 8)
    torch.testing.assert_close(symmetric(x), plain(x))
    torch.testing.assert_close(symmetric(x[:, :2], x, x.flip(1)), plain(x[:, :2], x, x.flip(1)))
    q, k, _ = symmetric.project(x)
    kernel = symmetric.similarity(q, k).exponent
    torch.testing.assert_close(kernel, kernel.mT)


def test_any_function_will_do():
    def cauchy(q, k):
        distance = torch.cdist(
            q.transpose(1, 2), k.transpose(1, 2), compute_mode="donot_use_mm_for_euclid_dist"
        )
        return 1 / (1 + distance.square())

    module = SimilarityAttention(8, 2, causal=True, similarity=cauchy).double()
    x = normal(2, 5, 8)
    torch.testing.assert_close(unrolled(module, x, 2, None), module(x))


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="similarity is 'cosine', but must be one of exp, rbf"):
        SimilarityAttention(8, 2, similarity="cosine")
    with pytest.raises(ValueError, match="similarity is 3, but must be a name or a function"):
        SimilarityAttention(8, 2, similarity=3)
    with pytest.raises(ValueError, match="similarity_options are for a similarity given by name"):
        SimilarityAttention(8, 2, similarity=torch.dot, similarity_options={"scale": 1.0})
    for name, options, message in (
        ("exp", {"scale": math.nan}, "scale is nan, but must be a finite number"),
        ("rbf", {"scale": "x"}, "scale is 'x', but must be a finite number"),
        ("polynomial", {"offset": "a"}, "offset is 'a', but must be a finite number"),
        ("linear", {"degree": 3}, "do not fit: DotProduct"),
        ("exp", 0, "similarity_options is 0, but must map names to values"),
    ):
        with pytest.raises(ValueError, match=message):
            SimilarityAttention(8, 2, similarity=name, similarity_options=options)
    with pytest.raises(ValueError, match="n_kv_heads is 1, but must be n_heads = 2 if symmetric"):
        SimilarityAttention(8, 2, symmetric=True, n_kv_heads=1)


@pytest.mark.parametrize("offset", [100, 3000])
def test_an_outlying_first_token_costs_no_digits_of_the_others(offset):
    """It is the origin that is subtracted, so that all others are far away from it."""
    k, v = normal(1, 40, 1, 8).float(), normal(1, 40, 1, 3, seed=1).float()
    q = k + 0.1
    q[:, 0] += offset
    k[:, 0] += offset
    found = similarity_attention(q, k, v, Rbf(), causal=True)
    expected = similarity_attention(q.double(), k.double(), v.double(), Rbf(), causal=True)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)
