"""Softmax attention against its written-out definition, and the cache as a value."""

from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unrolled.ops import native as kernels
from unrolled.ops import processor
from unrolled.ops import state as states
from unrolled.ops.dispatch import prefer
from unrolled.ops.softmax import attention, empty_cache, softmax_attention, softmax_prefill, softmax_step
from unrolled.ops.softmax import cache as cache_module
from unrolled.ops.softmax.cache import RECENT
from unrolled.ops.window import native

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=str(kernels.missing()))


def definition(q, k, v, allowed: Tensor, bias: Tensor | None = None) -> Tensor:
    """o = softmax(q k^T / sqrt(D)) v over the allowed pairs, row by row; nothing allowed gives 0."""
    (B, T, H, D), P = q.shape, q.shape[2] // k.shape[2]
    o = q.new_zeros(B, T, H, v.shape[3])
    allowed = allowed.expand(B, H, T, k.shape[1])
    for b in range(B):
        for h in range(H):
            for t in range(T):
                js = allowed[b, h, t].nonzero().squeeze(1)
                if len(js):
                    scores = k[b, js, h // P] @ q[b, t, h] / sqrt(D)
                    if bias is not None:
                        scores = scores + bias.expand(B, H, T, k.shape[1])[b, h, t, js]
                    o[b, t, h] = scores.softmax(0) @ v[b, js, h // P]
    return o


def leaves(B, T, S, H, G, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, 3), (B, S, G, 3), (B, S, G, 4)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@settings(max_examples=25)
@given(
    T=st.integers(0, 6),
    S=st.integers(0, 6),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    causal=st.booleans(),
    padded=st.booleans(),
    mask=st.sampled_from(["none", "boolean", "additive"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(T, S, heads, causal, padded, mask, dtype, seed):
    inputs = [x.detach().to(dtype).requires_grad_() for x in leaves(2, T, S, *heads, seed)]
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}[dtype]
    near = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    generator = torch.Generator().manual_seed(seed)
    allowed, arguments, bias = torch.ones(1, 1, T, S, dtype=torch.bool), {}, None
    if causal:
        allowed = allowed & (torch.arange(S) <= torch.arange(T)[:, None] + S - T)
    if padded:
        arguments["key_padding_mask"] = torch.rand(2, S, generator=generator) < 0.5
        allowed = allowed & ~arguments["key_padding_mask"][:, None, None]
    if mask == "boolean":
        arguments["attn_mask"] = torch.rand(2, heads[0], T, S, generator=generator) < 0.5
        allowed = allowed & arguments["attn_mask"]
    if mask == "additive":
        bias = torch.randn(T, S, generator=generator, dtype=torch.float64)
        arguments["attn_mask"] = bias
    found = softmax_attention(*inputs, causal=causal, **arguments)
    expected = definition(q, k, v, allowed, bias)
    torch.testing.assert_close(found, expected, **near)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    found_gradients = torch.autograd.grad((found * weights).sum(), inputs)
    expected_gradients = [torch.zeros_like(x) for x in (q, k, v)]
    if expected.requires_grad:  # some pair was allowed
        total = (expected * weights).sum()
        expected_gradients = torch.autograd.grad(total, (q, k, v), allow_unused=True, materialize_grads=True)
    for x, y in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(x, y, **near)


@pytest.mark.parametrize("padded", [True, False])
def test_scale_multiplies_the_scores_in_every_form(padded):
    q, k, v = (x.detach() for x in leaves(2, 9, 9, 2, 2))
    mask = torch.zeros(2, 9, dtype=torch.bool) if padded else None
    expected = softmax_attention(0.3 * sqrt(3) * q, k, v, causal=True)
    found = softmax_attention(q, k, v, causal=True, key_padding_mask=mask, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    prompt, before = (x[:, :8] for x in (q, k, v)), None if mask is None else mask[:, :8]
    prefilled, cache = softmax_prefill(*prompt, cache_like(k, v), key_padding_mask=before, scale=0.3)
    stepped, _ = softmax_step(q[:, 8], k[:, 8], v[:, 8], cache, scale=0.3)
    torch.testing.assert_close(torch.cat([prefilled, stepped[:, None]], 1), expected, rtol=1e-12, atol=1e-12)


def test_inputs_of_mixed_types_are_promoted():
    q, k, v = (x.detach() for x in leaves(1, 4, 4, 2, 2))
    bias = torch.zeros(4, 4, dtype=torch.float16)
    assert softmax_attention(q.float(), k, v.bfloat16(), attn_mask=bias).dtype == torch.bfloat16


def test_autocast_reaches_neither_prefill_nor_step():
    q, k, v = (x.detach().float() for x in leaves(1, 9, 9, 2, 2))

    def both():
        o, cache = softmax_prefill(q[:, :8], k[:, :8], v[:, :8], cache_like(k, v))
        return o, softmax_step(q[:, 8], k[:, 8], v[:, 8], cache)[0]

    expected = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_cache_holds_no_more_memory_than_it_says():
    q, k, v = (x.detach() for x in leaves(1, RECENT, RECENT, 1, 1))
    cache = cache_like(k, v)
    for t in range(RECENT):
        _, cache = softmax_step(q[:, t], k[:, t], v[:, t], cache)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in cache)


@pytest.mark.parametrize("field", ["past_v", "recent_k", "recent_padding", "position"])
def test_a_cache_of_another_shape_is_refused(field):
    q, k, v = (x.detach() for x in leaves(2, 3, 3, 2, 2))
    _, cache = softmax_step(q[:, 0], k[:, 0], v[:, 0], cache_like(k, v))
    wrong = cache._replace(**{field: getattr(cache, field)[:1]})
    with pytest.raises(ValueError, match=r"cache\.\w+ has shape .* but must be"):
        softmax_step(q[:, 1], k[:, 1], v[:, 1], wrong)


def test_torchs_kernels_can_be_chosen_and_agree():
    q, k, v = (x.detach() for x in leaves(2, 9, 9, 2, 2))
    found = [softmax_attention(q, k, v[..., :3], causal=True, backend=name) for name in ("flash", "math")]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="backend is 'cuda', but must be None or one of native, math, flash"):
        softmax_attention(q, k, v, backend="cuda")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masks", ["none", "padding", "packed"])
def test_the_native_kernels_agree_with_the_definition(dtype, causal, masks):
    T, S = (13, 13) if masks == "packed" else (9, 13)
    B = 1 if masks == "packed" else 3
    exact = leaves(B, T, S, 4, 2)
    options: dict[str, object] = {"causal": causal}
    if masks == "padding":
        options["key_padding_mask"] = torch.arange(S) >= torch.tensor([[S], [5], [0]])
    if masks == "packed":
        options["cu_seqlens"] = torch.tensor([0, 4, 4, 13], dtype=torch.int32)
    narrow = [x.detach().to(dtype).requires_grad_() for x in exact]
    rounded = [x.detach().double().requires_grad_() for x in narrow]
    found = softmax_attention(*narrow, backend="native", **options)
    expected = softmax_attention(*rounded, **options)
    assert torch.equal(found, softmax_attention(*narrow, **options))  # the kernels are chosen
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    near = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(found, expected, **near)
    gradients = [
        torch.autograd.grad(o.double().square().sum(), x) for o, x in ((found, narrow), (expected, rounded))
    ]
    torch.testing.assert_close(*gradients, **near)


@needs_kernels
def test_what_the_native_kernels_cannot_do_is_left_to_torch(monkeypatch):
    q, k, v = (x.detach().float() for x in leaves(2, 9, 9, 2, 2))
    seen = []
    monkeypatch.setattr(native, "forward", lambda *x, run=native.forward: (seen.append(x), run(*x))[1])
    mask = torch.ones(9, 9, dtype=torch.bool)
    softmax_attention(q, k, v, attn_mask=mask)
    softmax_attention(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="backend is 'native', which has no attn_mask"):
        softmax_attention(q, k, v, attn_mask=mask, backend="native")
    assert not seen
    softmax_attention(q, k, v)
    assert len(seen) == 1


@needs_kernels
def test_a_matrix_unit_computes_bf16_where_it_is_faster(monkeypatch):
    """It is slower only with gradients, and then only up to a number of keys."""
    monkeypatch.setattr(processor, "description", lambda: "flags : amx_bf16")
    monkeypatch.setattr(attention, "MOST_WITHOUT_MATRIX_UNIT", 64)
    seen = []
    monkeypatch.setattr(native, "forward", lambda *x, run=native.forward: (seen.append(x), run(*x))[1])

    def is_native(length, dtype=torch.bfloat16, *, learns=True, causal=False):
        seen.clear()
        x = torch.randn(1, length, 2, 8, dtype=dtype, requires_grad=learns)
        softmax_attention(x, x, x, causal=causal)
        return bool(seen)

    assert is_native(8)
    assert not is_native(9)
    assert is_native(16, causal=True)
    assert not is_native(18, causal=True)
    assert not is_native(8, learns=False)
    with torch.no_grad():
        assert not is_native(8)
    assert is_native(100, torch.float16, learns=False)
    assert is_native(100, torch.float32, learns=False)
    monkeypatch.setattr(processor, "description", lambda: "flags : avx512_bf16")
    assert is_native(100, learns=False)


@needs_kernels
def test_torch_computes_a_few_queries_on_many_keys(monkeypatch):
    monkeypatch.setattr(attention, "MANY_KEYS", 20)
    seen = []
    monkeypatch.setattr(native, "forward", lambda *x, run=native.forward: (seen.append(x), run(*x))[1])

    def is_native(T, S, *, dtype=torch.float32, learns=False, padded=False, causal=False):
        seen.clear()
        q, k = (torch.randn(1, n, 2, 8, dtype=dtype, requires_grad=learns) for n in (T, S))
        mask = torch.zeros(1, S, dtype=torch.bool) if padded else None
        o = softmax_attention(q, k, k, causal=causal, key_padding_mask=mask)
        exact = softmax_attention(q.double(), k.double(), k.double(), causal=causal)
        torch.testing.assert_close(o.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
        return bool(seen)

    assert not is_native(8, 19)
    assert is_native(9, 19)
    assert is_native(8, 19, causal=True)
    assert not is_native(8, 20, causal=True)
    assert is_native(8, 20, learns=True)
    assert is_native(8, 20, padded=True)
    assert is_native(8, 20, dtype=torch.float16)
    with torch.no_grad():
        assert not is_native(8, 20, learns=True)


@pytest.mark.parametrize("name", [None, "math", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_of_width_0_are_all_0(name, causal):
    q, k, v = torch.empty(2, 9, 2, 0), torch.empty(2, 9, 2, 0), torch.randn(2, 9, 2, 3)
    seen = v.cumsum(1) / torch.arange(1, 10).view(1, 9, 1, 1) if causal else v.mean(1, True).expand_as(v)
    torch.testing.assert_close(softmax_attention(q, k, v, causal=causal, backend=name), seen)
    if causal:
        _, cache = softmax_prefill(q[:, :8], k[:, :8], v[:, :8], cache_like(k, v))
        o, _ = softmax_step(q[:, 8], k[:, 8], v[:, 8], cache)
        torch.testing.assert_close(o, seen[:, 8])


def test_an_ordinary_gradient_is_that_of_the_fused_kernel():
    """Bit for bit: the math form takes its place only where the gradient is to be differentiated again."""
    q, k, v = x = [torch.randn(2, 40, 2, 8, requires_grad=True) for _ in range(3)]
    fused = torch.nn.functional.scaled_dot_product_attention(
        *(y.transpose(1, 2) for y in x), is_causal=True
    ).transpose(1, 2)
    expected = torch.autograd.grad(fused.square().sum(), x)
    with prefer("plain"):
        loss = softmax_attention(q, k, v, causal=True).square().sum()
    found = torch.autograd.grad(loss, x, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = torch.autograd.grad(loss, x, create_graph=True)
    assert not torch.equal(again[0], expected[0])
    torch.testing.assert_close(again, expected)


def cache_like(k, v):
    return empty_cache(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k)


@pytest.mark.parametrize("cuts", [(0,), (1,), (RECENT - 1,), (RECENT, 2 * RECENT + 1), (5, 5, 140)])
def test_prefill_and_steps_equal_one_pass(cuts):
    T = 2 * RECENT + 20
    q, k, v = leaves(2, T, T, 4, 2)
    expected = softmax_attention(q, k, v, causal=True)
    cache, outs, begin = cache_like(k, v), [], 0
    for end in cuts:
        part = slice(begin, end)
        o, cache = softmax_prefill(q[:, part], k[:, part], v[:, part], cache)
        outs.append(o)
        begin = end
    for t in range(begin, T):
        o, cache = softmax_step(q[:, t], k[:, t], v[:, t], cache)
        outs.append(o[:, None])
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-12, atol=1e-12)
    assert cache.position.tolist() == [T, T]


def test_prefill_masks_only_where_there_is_padding(monkeypatch):
    """A mask would copy all keys and values."""
    masks = []

    def noted(*x, key_padding_mask, run=softmax_attention, **options):
        masks.append(key_padding_mask)
        return run(*x, key_padding_mask=key_padding_mask, **options)

    monkeypatch.setattr(cache_module, "softmax_attention", noted)
    q, k, v = (x.detach() for x in leaves(2, 4, 4, 2, 2))
    padding = torch.zeros(2, 4, dtype=torch.bool)
    _, cache = softmax_prefill(q, k, v, cache_like(k, v), key_padding_mask=padding)
    _, cache = softmax_prefill(q, k, v, cache)
    assert masks == [None, None]
    padding[0, 0] = True
    _, cache = softmax_prefill(q, k, v, cache, key_padding_mask=padding)
    softmax_prefill(q, k, v, cache)
    assert [x.sum().item() for x in masks[2:]] == [1, 1]


def test_prompts_of_unequal_length_continue_as_if_alone():
    q, k, v = (x.detach() for x in leaves(2, 12, 12, 2, 2))
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[0, :3], padding[1, 6:] = True, True  # left in one row, right in the other
    _, cache = softmax_prefill(q[:, :8], k[:, :8], v[:, :8], cache_like(k, v), key_padding_mask=padding)
    assert cache.position.tolist() == [5, 6]
    o, _ = softmax_step(q[:, 8], k[:, 8], v[:, 8], cache)
    for row in range(2):
        real = [t for t in range(8) if not padding[row, t]] + [8]
        alone = softmax_attention(
            q[row : row + 1, 8:9], k[row : row + 1, real], v[row : row + 1, real], causal=True
        )
        torch.testing.assert_close(o[row], alone[0, 0], rtol=1e-12, atol=1e-12)


def test_two_continuations_share_a_cache_and_leave_it_alone():
    q, k, v = (x.detach() for x in leaves(1, RECENT + 3, RECENT + 3, 1, 1))
    _, cache = softmax_prefill(q[:, :3], k[:, :3], v[:, :3], cache_like(k, v))
    for t in range(3, RECENT + 1):
        _, cache = softmax_step(q[:, t], k[:, t], v[:, t], cache)
    before = {name: x.clone() for name, x in states.leaves(cache).items()}
    t = RECENT + 1
    left, left_cache = softmax_step(q[:, t], k[:, t], v[:, t], cache)
    softmax_step(q[:, t], -k[:, t], -v[:, t], cache)
    assert all(torch.equal(x, before[name]) for name, x in states.leaves(cache).items())
    again, _ = softmax_step(q[:, t], k[:, t], v[:, t], cache)
    assert torch.equal(left, again)
    assert left_cache.position.item() == RECENT + 2


def test_a_token_copies_a_64th_of_the_cache():
    q, k, v = (x.detach() for x in leaves(1, 1000, 1000, 1, 1))
    _, cache = softmax_prefill(q, k, v, cache_like(k, v))
    joined = 0
    for _ in range(2 * RECENT):
        past = cache.past_k
        _, cache = softmax_step(q[:, 0], k[:, 0], v[:, 0], cache)
        joined += cache.past_k is not past
    assert joined == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(5, 4).bool()}, r"attn_mask has shape \[5, 4\], but must broadcast to .*\[2, 4, 5, 5\]"),
        ({"attn_mask": torch.ones(5, 5).long()}, r"attn_mask has dtype torch.int64, but must be torch.bool"),
    ],
)  # fmt: skip
def test_wrong_masks_are_refused(arguments, message):
    q, k, v = leaves(2, 5, 5, 4, 2)
    with pytest.raises(ValueError, match=message):
        softmax_attention(q, k, v, **arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_mask_keeps_its_precision(dtype, autocast):
    """Neither type holds 0.25 times a position above 2^9, and fp16 no number of -1e5."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1000, 1, 8, generator=generator).to(dtype) for _ in range(3))
    mask = 0.25 * torch.arange(1000.0).expand(1000, 1000).clone()
    mask[0] = -1e5
    with torch.autocast("cpu", dtype, enabled=autocast):
        found = softmax_attention(q, k, v, attn_mask=mask)
    expected = softmax_attention(q.double(), k.double(), v.double(), attn_mask=mask.double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)


def test_a_mask_of_five_axes_is_refused():
    q, k, v = leaves(2, 5, 5, 4, 2)
    with pytest.raises(ValueError, match=r"attn_mask has shape \[1, 1, 1, 5, 5\], but must broadcast to"):
        softmax_attention(q, k, v, attn_mask=torch.ones(1, 1, 1, 5, 5, dtype=torch.bool))
