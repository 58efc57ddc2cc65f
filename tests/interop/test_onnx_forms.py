"""The forms of our operators in exported graphs compute the same as their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.contract import UnsupportedError
from unrolled.interop.onnx import forms
from unrolled.ops.conv import causal_conv
from unrolled.ops.feature_maps import Elu
from unrolled.ops.linear import LinearState, linear_attention_reference
from unrolled.ops.window import window_attention
from unrolled.ops.wkv import empty_state, wkv_step


@settings(max_examples=25)
@given(st.integers(1, 9), st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.booleans(), st.booleans())
def test_linear_attention(T, heads, gated, normalize):
    (H, G), generator = heads, torch.Generator().manual_seed(T)

    def rand(*size):
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    q, k, v = rand(2, T, H, 3), rand(2, T, G, 3), rand(2, T, G, 5)
    state = LinearState(rand(2, G, 3, 5), rand(2, G, 3))
    log_decay = -3 * rand(2, T, G) if gated else None
    found = forms.linear_attention((q, k, v, log_decay, *state, normalize))
    expected, after = linear_attention_reference(
        q, k, v, causal=True, log_decay=log_decay, state=state, return_state=True, normalize=normalize
    )
    for x, y in zip(found[:3], (expected, *after), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(2, 2), (4, 2)]), st.booleans())
def test_bidirectional_linear_attention(T, S, heads, normalize):
    (H, G), generator = heads, torch.Generator().manual_seed(T)

    def rand(*size):
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    q, k, v = rand(2, T, H, 3), rand(2, S, G, 3), rand(2, S, G, 5)
    operator = next(iter(forms.portable().values()))
    found = operator(q, k, v, None, None, None, None, False, normalize, None, None)
    expected, after = linear_attention_reference(q, k, v, return_state=True, normalize=normalize)
    for x, y in zip(found[:3], (expected, *after), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_linear_attention_of_mapped_queries_and_keys():
    q, k, v = (torch.randn(2, 5, 1, 3) for _ in range(3))
    state, phi = LinearState(torch.rand(2, 1, 3, 3), torch.rand(2, 1, 3)), Elu(3)
    expected = linear_attention_reference(q, k, v, causal=True, state=state, feature_map=phi)
    operator = next(iter(forms.portable().values()))
    found, *_ = operator(q, k, v, None, *state, None, True, True, "elu", None)
    torch.testing.assert_close(found, expected)


def test_a_query_with_zero_denominator_gives_zero():
    q, v = torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 2)
    state = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3)
    o, *_ = forms.linear_attention((q, torch.zeros_like(q), v, None, *state, True))
    assert torch.equal(o, torch.zeros(1, 2, 1, 2))


def test_a_negative_denominator_divides_and_a_tiny_one_gives_zero():
    q, k = torch.tensor([1.0, -1.0, 1e-33]).view(1, 3, 1, 1), torch.ones(1, 3, 1, 1)
    state = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    o, *_ = forms.linear_attention((q, k, 5 * k, None, *state, True))
    assert o.flatten().tolist() == [5, 5, 0]


def test_a_gate_of_zero_forgets_all_tokens_before():
    q, k, v, kv, k_sum = (torch.rand(1, *size, 3).double() for size in [(4, 1)] * 3 + [(1, 3), (1,)])
    log_decay = torch.tensor([-1.0, -torch.inf, -1.0, -0.5]).double().view(1, 4, 1)
    found = forms.linear_attention((q, k, v, log_decay, kv, k_sum, True))
    q, k, v, log_decay = (x[:, 1:] for x in (q, k, v, log_decay))
    nothing = torch.zeros_like(kv), torch.zeros_like(k_sum)
    expected = forms.linear_attention((q, k, v, log_decay.clamp(min=-9), *nothing, True))
    torch.testing.assert_close((found[0][:, 1:], *found[1:3]), expected[:3])


@settings(max_examples=25)
@given(st.integers(1, 9), st.sampled_from([1.0, 30.0, 1000.0]), st.booleans())
def test_the_averages_of_rwkv(T, spread, started):
    generator = torch.Generator().manual_seed(T)
    k, v, log_decay, bonus = (
        torch.randn(*size, 4, generator=generator, dtype=torch.float64) for size in ((2, T), (2, T), (), ())
    )
    k, log_decay = spread * k, -spread * log_decay.abs()
    state = empty_state(2, 4, k)
    if started:
        _, state = wkv_step(k[:, 0], v[:, 0], log_decay, bonus, state)
    found = forms.wkv(k, v, log_decay, bonus, state=state)
    outputs = []
    for t in range(T):
        o, state = wkv_step(k[:, t], v[:, t], log_decay, bonus, state)
        outputs.append(o)
    torch.testing.assert_close(found, (torch.stack(outputs, 1), state), rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(-1, 4), st.integers(-1, 2), st.booleans())
def test_window_attention(T, earlier, left, right, padded):
    generator = torch.Generator().manual_seed(T)
    q = torch.randn(2, T, 4, 3, generator=generator, dtype=torch.float64)
    k = torch.randn(2, T + earlier, 2, 3, generator=generator, dtype=torch.float64)
    padding = torch.rand(2, T + earlier, generator=generator) < 0.4 if padded else None
    o, lse = forms.window_attention(q, k, k, padding, None, left, right, 3**-0.5, None)
    expected = window_attention(q, k, k, window_size=(left, right), key_padding_mask=padding, return_lse=True)
    torch.testing.assert_close((o, lse), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("silu", [False, True])
def test_the_convolution(silu):
    x, weight, bias, state = torch.randn(2, 5, 3), torch.randn(3, 4), torch.randn(3), torch.randn(2, 3, 3)
    y, after = causal_conv(x, weight, bias=bias, activation="silu" if silu else None, state=state)
    torch.testing.assert_close(forms.causal_conv(x, weight, bias, state, None, silu), (y, after))


def test_packs_and_other_directions_are_refused():
    x = torch.ones(1, 2, 1, 3)
    state = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3)
    for form in (forms.portable(), forms.fused()):
        linear = next(iter(form.values()))
        with pytest.raises(UnsupportedError, match="not packs"):
            linear(x, x, x, None, *state, torch.tensor([0, 2]), True, True, None, None)
        for left in ((None, *state, None, False), (x[..., 0], None, None, None, False), (*[None] * 4, True)):
            with pytest.raises(UnsupportedError, match="causal from a state, or bidirectional without state"):
                linear(x, x, x, *left, True, None, None)
    with pytest.raises(UnsupportedError, match="export the plain graph"):
        forms.fused_linear_attention((x, x, x, None, *state, False))
    with pytest.raises(UnsupportedError, match="not packs"):
        forms.window_attention(x, x, x, None, torch.tensor([0, 2]), 1, 0, 1.0, None)
    rates = torch.zeros(3)
    for given_ in ({}, {"key_padding_mask": x[..., 0, 0] > 0}, {"cu_seqlens": torch.tensor([0, 2])}):
        with pytest.raises(NotImplementedError, match="has neither padding nor packs"):
            forms.wkv(x[..., 0, :], x[..., 0, :], rates, rates, **given_)
    with pytest.raises(UnsupportedError, match="not packs"):
        forms.causal_conv(
            x[..., 0], torch.ones(1, 3), None, torch.zeros(1, 2, 1), torch.tensor([0, 2]), False
        )


def test_forms_are_called_in_place_of_functions():
    made = dict.fromkeys(forms.portable(), lambda *arguments: "a form")
    x = torch.ones(1, 2, 1, 3)
    with forms.InPlace(made):
        assert torch.nn.functional.logsigmoid(x) == "a form"
        with pytest.raises(ValueError, match="too many values"):
            window_attention(x, x, x, window_size=(1, 0))  # which takes two results apart
    assert torch.equal(torch.nn.functional.logsigmoid(x), -x.neg().exp().log1p())
