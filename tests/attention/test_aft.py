"""What is specific to AFT: its formula in four variants, and averages that never leave the range of their type."""

import math

import pytest
import torch
from contract_parts import in_two_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import attention
from unrolled.attention.aft import AFT
from unrolled.contract import UnsupportedError
from unrolled.testing import Maker

KINDS = ["full", "local", "simple", "conv"]


def made(kind, *, causal, window=3, seed=0, scale=3.0, **options):
    """AFT of 6 elements whose biases are large enough to matter, in fp64."""
    torch.manual_seed(seed)
    if kind in ("local", "conv"):
        options["window"] = window
    module = AFT(6, 2, causal=causal, position_bias=kind, **options).double()
    with torch.no_grad():
        for parameter in module.bias.parameters() if module.bias is not None else ():
            parameter.normal_(std=scale / 8 if kind != "conv" else 1.0)
    return module


def biases(module, T, S):
    """w `[H,T,S]`, written out pair by pair."""
    w = torch.zeros(module.n_heads, T, S, dtype=torch.float64)
    for t in range(T):
        for j in range(S):
            if module.position_bias == "full" or (
                module.position_bias == "local" and abs(t - j) < module.window
            ):
                w[:, t, j] = module.bias.a[t] @ module.bias.b[j]
            elif module.position_bias == "conv":
                taps = module.bias.taps
                deviation = (taps.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
                normal = module.bias.gamma * (taps - taps.mean(-1, keepdim=True)) / deviation
                size = taps.shape[1]
                place = j - t + (size - 1 if module.causal else size // 2)
                if 0 <= place < size:
                    w[:, t, j] = (normal + module.bias.beta)[:, place]
    return w


def definition(module, query, memory=None, keep=None):
    """sigmoid(q) * sum_j e^(k_j + w_tj) v_j / sum_j e^(k_j + w_tj), with a softmax for each element."""
    memory = query if memory is None else memory
    H, M = module.n_heads, module.head_dim
    K = 1 if module.position_bias == "conv" else M
    weights = module.qkv_proj.weight.split([H * M, H * K, H * M])
    shifts = module.qkv_proj.bias.split([H * M, H * K, H * M])
    q, k, v = (x @ w.T + b for x, w, b in zip((query, memory, memory), weights, shifts, strict=True))
    q, k, v = q.unflatten(-1, (H, M)), k.unflatten(-1, (H, K)), v.unflatten(-1, (H, M))
    T, S = query.shape[1], memory.shape[1]
    w = biases(module, T, S)
    if module.causal:
        w = w.masked_fill(torch.arange(S) > torch.arange(T)[:, None], -math.inf)
    if keep is not None:
        w = w.masked_fill(~keep, -math.inf)
    scores = k.permute(0, 2, 1, 3)[:, :, None] + w[None, ..., None]
    average = (scores.softmax(3) * v.permute(0, 2, 1, 3)[:, :, None]).sum(3).transpose(1, 2)
    return module.out_proj((q.sigmoid() * average).flatten(2))


def with_gradients(y, module, x):
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return [y, *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"position_bias": "local", "window": 5},
        {"position_bias": "simple"},
        {"position_bias": "conv", "window": 5},
    ],
    ids=lambda options: options["position_bias"],
)
@in_two_parts
def test_every_variant_keeps_the_contract(options, check_part):
    check_part(Maker(AFT, options))


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.booleans(), st.integers(1, 40), st.sampled_from([1, 3, 5, 17, 51]))
def test_every_variant_is_its_formula(kind, causal, T, window):
    module = made(kind, causal=causal, window=window, max_length=64)
    x = torch.randn(2, T, 6, dtype=torch.float64, requires_grad=True)
    for found, expected in zip(
        with_gradients(module(x), module, x), with_gradients(definition(module, x), module, x), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["full", "simple"])
@pytest.mark.parametrize("S", [2, 5, 9])
def test_another_sequence_is_read_by_the_same_formula(kind, S):
    module = made(kind, causal=False)
    query, memory = torch.randn(2, 5, 6).double(), torch.randn(2, S, 6).double()
    torch.testing.assert_close(module(query, memory), definition(module, query, memory))


def test_full_takes_any_mask():
    module = made("full", causal=False)
    x = torch.randn(1, 6, 6).double()
    keep = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    keep |= torch.eye(6, dtype=torch.bool)
    torch.testing.assert_close(module(x, attn_mask=keep), definition(module, x, keep=keep))
    with pytest.raises(ValueError, match="attn_mask has shape"):
        module(x, attn_mask=keep[:, :5])
    with pytest.raises(UnsupportedError, match="not both"):
        module(x, attn_mask=keep, cu_seqlens=torch.tensor([0, 6], dtype=torch.int32))


@pytest.mark.parametrize("causal", [True, False])
def test_conv_begins_without_biases(causal):
    module, x = AFT(6, 2, causal=causal, position_bias="conv").double(), torch.randn(1, 20, 6).double()
    assert not biases(module, 20, 20).any()
    torch.testing.assert_close(module(x), definition(module, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("slope", [50.0, -50.0])
def test_keys_of_any_size_are_averaged(kind, causal, slope):
    """exp(k) would overflow by far, and one maximum of the whole sequence would leave the first tokens 0 / 0."""
    exact = made(kind, causal=causal)
    with torch.no_grad():
        first = 6 + (2 if kind == "conv" else 6)
        exact.qkv_proj.weight[6:first] *= slope
    x = torch.randn(2, 40, 6).double() + torch.arange(40).view(1, 40, 1) / 10
    expected = definition(exact, x)
    torch.testing.assert_close(exact(x), expected, rtol=1e-9, atol=1e-9)
    single = made(kind, causal=causal).float()
    single.load_state_dict(exact.state_dict())
    y = single(x.float())
    y.sum().backward()
    # Keys are about 1000, so rounding them to fp32 alone moves a weight by 1000 * 6e-8 of it, and more.
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-2)
    assert all(p.grad.isfinite().all() for p in single.parameters())


@pytest.mark.parametrize("kind", ["full", "local", "conv"])
@pytest.mark.parametrize("causal", [True, False])
def test_biases_of_any_size_are_averaged(kind, causal):
    """The largest key has the lowest bias: both scaled factors vanish, and only the definition is exact."""
    module = made(kind, causal=causal, window=5, scale=0.0)
    with torch.no_grad():
        if kind == "conv":
            module.bias.beta.fill_(-400.0)
        else:
            module.bias.a[:, 0], module.bias.b[:, 0] = 1.0, -400.0 * (torch.arange(1024) == 7)
    x = torch.randn(1, 24, 6, requires_grad=True)
    with torch.no_grad():
        x[:, 7] += 200.0
    exact = x.detach().double().requires_grad_()
    expected = with_gradients(definition(module, exact), module, exact)
    single = made(kind, causal=causal, window=5).float()
    single.load_state_dict(module.state_dict())
    found = with_gradients(single(x), single, x)
    for ours, theirs in zip(found, expected, strict=True):
        scale = max(1.0, float(theirs.detach().abs().max()))
        assert (ours.double() - theirs).abs().max() <= 1e-3 * scale


@pytest.mark.parametrize("kind", ["local", "conv"])
def test_biases_of_any_size_meet_what_a_state_holds(kind):
    module = made(kind, causal=True, window=4, scale=0.0)
    with torch.no_grad():
        for name, parameter in module.bias.named_parameters():
            parameter.copy_(
                torch.linspace(-40, 40, parameter.numel(), dtype=torch.float64).view_as(parameter)
            )
            if name in ("a", "b"):
                parameter.copy_(torch.randn_like(parameter) * 12)
    x = torch.randn(2, 50, 6).double()
    y, state = module.prefill(x[:, :9], module.init_state(2))
    y_more, state = module.prefill(x[:, 9:49], state)
    y_last, _ = module.step(x[:, 49], state)
    torch.testing.assert_close(torch.cat([y, y_more, y_last[:, None]], 1), definition(module, x))


@pytest.mark.compilers
def test_long_sequences_compile():
    """The contract compiles a few tokens, which have a form of their own."""
    module = made("local", causal=True)
    x = torch.randn(2, 20, 6).double()
    padding = torch.arange(20) < torch.tensor([[3], [0]])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, key_padding_mask=padding), module(x, key_padding_mask=padding))


@pytest.mark.parametrize(
    ("kind", "constant"), [("full", False), ("local", True), ("simple", True), ("conv", True)]
)
def test_supports_says_what_a_variant_can_do(kind, constant):
    supports = made(kind, causal=True).supports
    assert (supports.recurrence == "constant") == constant
    assert supports.attn_mask == (kind == "full")
    assert supports.cross == (kind in ("full", "simple"))
    assert supports.positions == (kind != "simple")


@pytest.mark.parametrize("kind", ["full", "local"])
def test_positions_end_at_max_length(kind):
    module = made(kind, causal=True, max_length=8)
    x = torch.randn(1, 9, 6).double()
    padding = torch.arange(9)[None] < 1
    module(x, key_padding_mask=padding)  # only eight count
    for too_long in (
        lambda: module(x),
        lambda: module.prefill(x, module.init_state(1)),
        lambda: module.step(x[:, 8], module.prefill(x[:, :8], module.init_state(1))[1]),
    ):
        with pytest.raises(
            ValueError, match="the sequence is 9 tokens long, but aft was made for max_length = 8"
        ):
            too_long()
    _, state = module.prefill(x[:, :5], module.init_state(1), key_padding_mask=padding[:, :5])
    y, _ = module.prefill(x[:, 5:], state)
    torch.testing.assert_close(y[:, -1], module(x[:, 1:])[:, -1])


@pytest.mark.parametrize("kind", ["simple", "conv"])
def test_other_variants_have_no_longest_sequence(kind):
    assert made(kind, causal=True, max_length=8)(torch.randn(1, 30, 6).double()).shape == (1, 30, 6)


WRONG = {
    "position_bias is 'none', but must be one of full, local, simple, conv": {"position_bias": "none"},
    "window is 3, but must be None for 'full'": {"window": 3},
    "window is 0, but must be at least 1": {"position_bias": "local", "window": 0},
    "max_length is 0": {"max_length": 0},
    "bias_rank is 0": {"bias_rank": 0},
    "window is 4, but must be odd": {"position_bias": "conv", "window": 4},
    "n_kv_heads is 1 and value_dim 3, but must be 2 and 3": {"n_kv_heads": 1},
    "n_kv_heads is 2 and value_dim 5": {"value_dim": 5},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_named(message):
    with pytest.raises(ValueError, match=message):
        AFT(6, 2, **WRONG[message])


def test_what_it_cannot_do_is_refused():
    with pytest.raises(UnsupportedError, match="no products to rotate"):
        AFT(6, 2, rotary=True)
    x = torch.randn(1, 5, 6).double()
    for kind in ("local", "conv"):
        with pytest.raises(UnsupportedError, match="does not support cross-attention"):
            made(kind, causal=False)(x, x)
    with pytest.raises(ValueError, match=r"value has shape \[1, 4, 6\], but must be \[1, 5, 6\]"):
        made("full", causal=False)(x, x, x[:, :4])
    module, other = made("local", causal=True), made("local", causal=True, window=6)
    with pytest.raises(
        ValueError, match=r"state.k is .* \[1, 5, 2, 3\] on cpu, but must be .* \[1, 2, 2, 3\]"
    ):
        module.step(x[:, 0], other.init_state(1))


@pytest.mark.parametrize("position_bias", ["full", "local"])
def test_factors_of_aft_start_small(position_bias):
    torch.manual_seed(0)
    bias = attention.load("aft")(8, 2, position_bias=position_bias).bias
    for factor in (bias.a, bias.b):
        assert factor.std().item() == pytest.approx(0.01, rel=0.02)
