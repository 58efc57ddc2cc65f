"""Window attention: the block form must equal the definition, at a cost proportional to the window."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from window_cases import PADDINGS, Case, outputs_and_gradients

from unrolled import window_attention, window_attention_reference
from unrolled.ops.merge import merge_softmax
from unrolled.ops.window import blocks as window_blocks
from unrolled.ops.window.blocks import BLOCK, Inputs, Options


def assert_agree(form, other, case: Case, tolerance: float = 1e-12) -> None:
    """Require equal outputs and gradients."""
    pairs = zip(outputs_and_gradients(form, case), outputs_and_gradients(other, case), strict=True)
    for x, y in pairs:
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        scale = y.nan_to_num(neginf=0).abs().amax() if y.numel() else 0
        torch.testing.assert_close(x, y, rtol=0, atol=float(tolerance * (1 + scale)))


sides = st.one_of(st.sampled_from([-1, 0, 1, 63, 64, 300]), st.integers(0, 90))


@settings(max_examples=80)
@given(
    T=st.integers(0, 150),
    S=st.integers(0, 150),
    window=st.tuples(sides, sides),
    B=st.integers(0, 2),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    padding=st.sampled_from(PADDINGS),
    seed=st.integers(0, 9),
)
def test_equals_the_definition(T, S, window, B, heads, widths, padding, seed):
    case = Case(T, S, window, B, *heads, *widths, padding, seed=seed)
    assert_agree(window_attention, window_attention_reference, case)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 2), st.integers(0, 90)), max_size=6).map(tuple),
    window=st.tuples(sides, sides),
    padding=st.sampled_from(PADDINGS),
)
def test_packed_sequences_equal_the_definition(lengths, window, padding):
    case = Case(window=window, padding=padding, lengths=lengths)
    assert_agree(window_attention, window_attention_reference, case)


def through_sdpa(q, k, v, *, window_size, scale=None, key_padding_mask=None, **_):
    """Torch's own attention under a mask written out pair by pair."""
    (B, T), S = q.shape[:2], k.shape[1]
    left, right = (10**9 if side < 0 else side for side in window_size)
    allowed = torch.tensor(
        [[i + S - T - left <= j <= i + S - T + right for j in range(S)] for i in range(T)]
    ).expand(B, 1, T, S)
    if key_padding_mask is not None:
        allowed = allowed & ~key_padding_mask[:, None, None]
    heads = (x.transpose(1, 2) for x in (q, k, v))
    o = scaled_dot_product_attention(*heads, attn_mask=allowed, scale=scale, enable_gqa=True).transpose(1, 2)
    scores = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    something = allowed.any(-1).transpose(1, 2)
    lse = scores.where(allowed.transpose(1, 2) | ~something.unsqueeze(-1), -math.inf).logsumexp(-1)
    return o, lse.where(something, -math.inf)


@pytest.mark.parametrize("padding", ["none", "scattered"])
@pytest.mark.parametrize(("T", "S"), [(90, 90), (40, 110), (110, 40)])
@pytest.mark.parametrize("window", [(7, 0), (0, 7), (20, 33), (-1, 0), (-1, -1)])
def test_equals_torchs_attention_under_the_same_mask(T, S, window, padding):
    case = Case(T, S, window, padding=padding, scale=0.7)
    assert_agree(window_attention, through_sdpa, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(40, 0), (30, 30), (0, 0), (-1, 0)])
def test_error_is_at_most_twice_that_of_the_definition_in_the_same_type(dtype, window):
    # Both are compared with the definition in fp64 on the same (already rounded) inputs.
    case = Case(T=300, S=300, window=window, D=16, M=16, dtype=dtype)
    exact = outputs_and_gradients(window_attention_reference, replace(case, computed_in=torch.float64))
    plain = outputs_and_gradients(window_attention, case)
    reference = outputs_and_gradients(window_attention_reference, case)
    for name, x, y, z in zip(("o", "lse", "dq", "dk", "dv"), plain, reference, exact, strict=True):
        error, allowed = (x.double() - z).norm(), 2 * (y.double() - z).norm()
        assert error <= allowed + 1e-7 * z.norm(), f"{name}: {error:g} > {allowed:g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_of_one_key_sends_nothing_back_to_queries(dtype):
    # The softmax of one score is 1 whatever the score is. Through the rounded output, this would not cancel.
    q, k, v = (torch.randn(1, 100, 2, 8).to(dtype).requires_grad_() for _ in range(3))
    o = window_attention(q, k, v, window_size=(0, 0))
    assert torch.equal(o, v)
    o.backward(torch.randn(o.shape).to(dtype))
    assert not q.grad.any()
    assert not k.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    q, k, v = (torch.randn(1, 300, 2, 16).to(dtype) for _ in range(3))
    found, lse = window_attention(q, k, v, window_size=(50, 0), return_lse=True)
    exact = window_attention(q.float(), k.float(), v.float(), window_size=(50, 0))
    assert torch.equal(found, exact.to(dtype))
    assert lse.dtype == torch.float32


def test_large_scores_do_not_overflow():
    loud = Case(T=100, S=100, window=(9, 9), scale=1e3)
    for x in outputs_and_gradients(window_attention, loud):
        assert x.isfinite().all()
    # A score of 1e3 carries an error of 1e3 ulp into the exponent.
    assert_agree(window_attention, window_attention_reference, loud, tolerance=1e-10)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(found) if isinstance(x, Tensor)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return found


def cost(T: int, window: tuple[int, int], packed: bool = False) -> tuple[int, int]:
    """Largest tensor (in elements) and multiplications of a forward and a backward pass of 2 heads of 4."""
    q, k, v = (torch.randn(1, T, 2, 4) for _ in range(3))
    cu_seqlens = torch.arange(0, T + 1, T // 8, dtype=torch.int32) if packed else None
    inputs, options = Inputs(q, k, v, None), Options(cu_seqlens, window, 1.0)
    with Largest() as memory, FlopCounterMode(display=False) as time:
        o, lse = window_blocks.forward(inputs, options)
        window_blocks.backward(o, lse, inputs, lse, options)
    return memory.elements, time.get_total_flops() // 2


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [(0, 0), (33, 0), (0, 100), (100, 100)])
def test_cost_is_proportional_to_the_window(window, packed):
    T, H, D = 1024, 2, 4
    memory, multiplications = cost(T, window, packed)
    keys = BLOCK + sum(window)  # that a block reads
    assert memory <= max(T * H * D, H * BLOCK * keys)
    assert multiplications <= 7 * T * H * D * keys  # two products forward and five back
    assert multiplications > 0.9 * 7 * T * H * D * keys
    assert cost(2 * T, window, packed)[1] <= 2.1 * multiplications


def test_causal_attention_does_half_the_work_of_full_attention():
    assert cost(2048, (-1, 0))[1] < 0.52 * cost(2048, (-1, -1))[1]


def test_nothing_but_inputs_and_lse_is_kept_for_the_backward_pass():
    q, k, v = (torch.randn(1, 1000, 2, 4).requires_grad_() for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        window_attention(q, k, v, window_size=(50, 50))
    assert 0 < sum(x.numel() for x in kept) <= q.numel() + k.numel() + v.numel() + 1000 * 2


@pytest.mark.parametrize("length", [9, 130])
def test_keys_outside_the_window_cannot_change_one_bit(length):
    now, left, right = length // 2, 3, 2
    q, k, v = (torch.randn(1, length, 2, 4) for _ in range(3))
    outside = torch.ones(length, dtype=torch.bool)
    outside[now - left : now + right + 1] = False
    others = [x.clone() for x in (k, v)]
    for x in others:
        x[:, outside] = 12 * torch.randn(1, int(outside.sum()), 2, 4)
    options = {"window_size": (left, right), "return_lse": True}
    found, changed = window_attention(q, k, v, **options), window_attention(q, *others, **options)
    for x, y in zip(found, changed, strict=True):
        assert torch.equal(x[:, now], y[:, now])
        assert not torch.equal(x, y)


@pytest.mark.parametrize("padded", [True, False])
def test_parts_of_a_softmax_merge_exactly_through_lse(padded):
    # The window, what lies before it and what lies after it: shifted keys turn the rest into windows, too.
    left, right, length = 6, 4, 90
    qkv = [torch.randn(2, length, 2, 5, dtype=torch.float64).requires_grad_() for _ in range(3)]
    padding = (torch.rand(2, length) < 0.3) if padded else torch.zeros(2, length, dtype=torch.bool)

    def parts(q, k, v):
        def attend(shift: int, window: tuple[int, int]):
            # Key j stands at j + shift; the row is filled up with padding, so that T = S.
            k_moved, v_moved = (torch.roll(x, shift, 1) for x in (k, v))
            place = torch.arange(length)
            wrapped = (place < shift) | (place >= length + shift)
            mask = wrapped | torch.roll(padding, shift, 1)
            return window_attention(
                q, k_moved, v_moved, window_size=window, key_padding_mask=mask, return_lse=True
            )

        return [attend(0, (left, right)), attend(left + 1, (-1, 0)), attend(-right - 1, (0, -1))]

    found, lse = merge_softmax(parts(*qkv))
    expected, expected_lse = window_attention_reference(
        *qkv, window_size=(-1, -1), key_padding_mask=padding, return_lse=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad((o * weights).sum() + x.square().sum(), qkv)
        for o, x in ((found, lse), (expected, expected_lse))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("create_graph", [True, False])
def test_nothing_to_read_gives_zero_with_zero_gradient(create_graph):
    q, k, v = (torch.randn(2, 6, 1, 3).requires_grad_() for _ in range(3))
    padding = torch.tensor([[True] * 6, [True, True, False, False, False, False]])
    o, lse = window_attention(q, k, v, window_size=(2, 0), key_padding_mask=padding, return_lse=True)
    nothing = torch.tensor([[True] * 6, [True, True, False, False, False, False]])
    assert not o[nothing].any()
    assert (lse[nothing] == -math.inf).all()
    # Whatever comes back to such a query, even from the logarithm of 0, goes no further.
    grads = [
        torch.ones_like(x).masked_fill(nothing.view(2, 6, *[1] * (x.dim() - 2)), math.nan) for x in (o, lse)
    ]
    for x in torch.autograd.grad((o, lse), (q, k, v), grads, create_graph=create_graph):
        assert x.isfinite().all()
        assert not x[nothing].any()
        assert x[1, 2:].any()


def test_queries_before_the_first_key_read_nothing():
    q, k, v = torch.randn(1, 200, 1, 3), torch.randn(1, 50, 1, 3), torch.randn(1, 50, 1, 3)
    o, lse = window_attention(q, k, v, window_size=(4, 2), return_lse=True)
    assert not o[:, :148].any()
    assert (lse[:, :148] == -math.inf).all()
    assert lse[:, 148:].isfinite().all()


def test_inputs_of_mixed_types_are_promoted():
    q, k, v = torch.rand(1, 5, 1, 3), torch.rand(1, 5, 1, 3).double(), torch.rand(1, 5, 1, 3).bfloat16()
    o, lse = window_attention(q, k, v, window_size=(1, 1), return_lse=True)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float64)


@pytest.mark.parametrize("form", [window_attention, window_attention_reference])
def test_autocast_does_not_reach_the_softmax(form):
    q, k, v = (torch.rand(1, 200, 1, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = form(q, k, v, window_size=(9, 0))
    assert torch.equal(found, form(q, k, v, window_size=(9, 0)))


@pytest.mark.parametrize("window", [(1, 0), (1, 2), (-1, -1)])
@pytest.mark.parametrize("heads_per_group", [1, 2])
def test_gradients_of_any_order_are_right(window, heads_per_group):
    case = Case(T=4, S=4, window=window, B=1, heads_per_group=heads_per_group, D=2, M=2)
    qkv, options = case.tensors()

    def form(q, k, v):
        return window_attention(q, k, v, **options, return_lse=True)

    assert torch.autograd.gradcheck(form, qkv)
    assert torch.autograd.gradgradcheck(form, qkv)


# torch.func.jvp itself goes through what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_functional_transforms_agree_with_the_definition():
    q, k, v, tangent = (torch.rand(1, 70, 1, 2, dtype=torch.float64) for _ in range(4))
    padding = (torch.arange(70) % 3 == 1).unsqueeze(0)  # every query keeps a key

    def of(form):
        def total(q, padding=padding):
            o, lse = form(q, k, v, window_size=(9, 2), key_padding_mask=padding, return_lse=True)
            return o.sum() + lse.square().sum()

        return total

    for transform in (
        lambda f: torch.func.jvp(f, (q,), (tangent,))[1],
        lambda f: torch.func.grad(f)(q),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([q, 2 * q])),
        lambda f: torch.func.vmap(f, (None, 0))(q, torch.stack([padding, torch.zeros_like(padding)])),
    ):
        found, expected = transform(of(window_attention)), transform(of(window_attention_reference))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_is_a_well_behaved_torch_operator(packed, padded):
    q, k, v = (torch.rand(1, 9, 2, 3).requires_grad_() for _ in range(3))
    padding = torch.rand(1, 9) < 0.3 if padded else None
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32) if packed else None
    arguments = (q, k, v, padding, cu_seqlens, 2, 1, 0.5, None)
    torch.library.opcheck(torch.ops.unrolled.window_attention.default, arguments)


def test_compiles_with_everything_at_once_gradients_included():
    compiled = torch.compile(window_attention, fullgraph=True, backend="aot_eager")
    for case in (
        Case(T=50, S=70, padding="scattered", dtype=torch.float32),
        Case(lengths=(3, 40, 0, 9), dtype=torch.float32),
    ):
        assert_agree(compiled, window_attention, case, tolerance=1e-6)


def inputs(**changes):
    found = {"q": torch.rand(2, 5, 4, 3), "k": torch.rand(2, 5, 2, 3), "v": torch.rand(2, 5, 2, 6)}
    return found | {"window_size": (1, 1)} | changes


@pytest.mark.parametrize("form", [window_attention, window_attention_reference])
def test_scores_of_width_0_are_all_0(form):
    v = torch.rand(1, 9, 2, 5)
    found, expected = (
        form(x, x, v, window_size=(2, 1), return_lse=True) for x in (v.new_empty(1, 9, 2, 0), 0 * v)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", [window_attention, window_attention_reference])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\), but must be \(left, right\), each at least 0, or -1"),
        ({"window_size": (3,)}, r"window_size is \(3,\), but must be \(left, right\)"),
        ({"window_size": 3}, r"window_size is 3, but must be \(left, right\)"),
        ({"window_size": (1.5, 0)}, r"window_size is \(1.5, 0\), but must be \(left, right\)"),
        ({"scale": float("nan")}, "scale is nan, but must be a finite number"),
        ({"scale": "x"}, "scale is 'x', but must be a finite number"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_clear_sentence(form, changes, message):
    with pytest.raises(ValueError, match=message):
        form(**inputs(**changes))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("fortran", r"backend is 'fortran', but must be None .* plain"),
        ("flex", r"backend is 'flex', which cannot run torch.float32 .* on cpu"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(backend, message):
    with pytest.raises(ValueError, match=message):
        window_attention(**inputs(), backend=backend)
