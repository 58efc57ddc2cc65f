"""What is specific to efficient attention: its two softmaxes, and their causal form."""

import pytest
import torch
from agreement import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.attention.efficient import (
    causal_efficient_attention,
    efficient_attention,
    efficient_attention_reference,
    empty_state,
)
from unrolled.ops.masks import causal_mask


def heads(T=9, S=None, H=4, G=2, D=5, M=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    S = T if S is None else S
    shapes = [(2, T, H, D), (2, S, G, D), (2, S, G, M)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


def written_out(q, k, v, n_keys):
    """By loops: query i averages the first n_keys[i] values with each feature, and mixes the averages."""
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        for c in range(q.shape[3]):
            g, n = h // (q.shape[2] // k.shape[2]), n_keys[i]
            o[b, i, h] += q[b, i, h].softmax(-1)[c] * (k[b, :n, g, c].softmax(-1) @ v[b, :n, g])
    return o


def test_the_definition_is_that_of_the_paper():
    q, k, v = heads(T=4)
    lower, everything = causal_mask(4, 4), torch.ones(4, 4, dtype=torch.bool)
    torch.testing.assert_close(
        efficient_attention_reference(q, k, v, everything), written_out(q, k, v, [4] * 4)
    )
    torch.testing.assert_close(
        efficient_attention_reference(q, k, v, lower), written_out(q, k, v, [1, 2, 3, 4])
    )


@settings(max_examples=15)
@given(T=st.integers(1, 80), extra=st.integers(0, 9), heads_=st.tuples(st.integers(1, 2), st.integers(1, 3)))
def test_equals_the_definition(T, extra, heads_):
    G, P = heads_
    inputs = heads(T, T + extra, G * P, G)
    everything = torch.ones(T, T + extra, dtype=torch.bool)
    assert_same(efficient_attention(*inputs), efficient_attention_reference(*inputs, everything), inputs)
    causal, _ = causal_efficient_attention(*inputs)
    expected = efficient_attention_reference(*inputs, causal_mask(T, T + extra))
    assert_same(causal, expected, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_sum_to_1(dtype):
    q, k, _ = heads(T=3000, D=16, dtype=dtype)
    ones = torch.ones(2, 3000, 2, 1, dtype=dtype)
    for o in (efficient_attention(q, k, ones), causal_efficient_attention(q, k, ones)[0]):
        assert (o - 1).abs().max() <= 3000 * torch.finfo(dtype).eps  # what 3000 additions may round away


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_keys_of_any_size_neither_overflow_nor_vanish(size):
    # Rising keys: each new one outweighs all before it, and exp of it would be inf. Falling ones: exp(k - max
    # over all positions) would be 0 for all but the first, which only the first query may tell by.
    q, _, v = heads(T=70, dtype=torch.float32)
    rising = (size * torch.arange(70.0)[:, None, None]).expand(2, 70, 2, 5).clone().requires_grad_()
    for k, expected in ((rising, v), (-rising, v[:, :1].expand_as(v))):
        o, _ = causal_efficient_attention(q, k, v)
        torch.testing.assert_close(o, expected.repeat_interleave(2, 2))
        gradients = torch.autograd.grad(o.sum(), (q, k, v))
        assert all(g.isfinite().all() for g in gradients)


def test_padding_in_a_pack_is_padding():
    q, k, v = (x[:1] for x in heads(T=12))
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, [1, 5, 6]] = True
    packed = efficient_attention(q, k, v, cu_seqlens=cu_seqlens, key_padding_mask=mask)
    for a, b in ((0, 5), (5, 12)):
        tokens = [x[:, a:b][:, ~mask[0, a:b]] for x in (q, k, v)]
        torch.testing.assert_close(packed[:, a:b][:, ~mask[0, a:b]], efficient_attention(*tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_survives_65536_tokens(dtype):
    q, k, v = (
        torch.randn(1, 65_536, 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(3)
    )
    found, _ = causal_efficient_attention(q, k, v)
    exact, _ = causal_efficient_attention(q.double(), k.double(), v.double())
    # Only the output is rounded; what is summed in fp32 is off by less than 1e-6.
    half_ulp = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= half_ulp * exact.abs() * 1.01 + 1e-6).all()


def test_a_state_of_another_batch_is_refused():
    q, k, v = heads()
    state = empty_state(k, v, torch.float64)
    with pytest.raises(ValueError, match=r"state.k_max has shape \[1, 2, 5\], but must be \[2, 2, 5\]"):
        causal_efficient_attention(q, k, v, state=state._replace(k_max=state.k_max[:1]))
