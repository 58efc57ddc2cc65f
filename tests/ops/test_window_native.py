"""The C++ kernels of window attention, on every instruction set that this machine can run."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_cases import PADDINGS, Case, assert_error_at_most_twice_that_of, errors

from unrolled import window_attention, window_attention_reference
from unrolled.ops import native

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("instruction_set", "poisoned_memory")
form = partial(window_attention, backend="native")
plain = partial(window_attention, backend="plain")
others = [plain, window_attention_reference]


sides = st.sampled_from([-1, 0, 1, 5, 16, 63, 64, 300])
widths = st.sampled_from([1, 3, 8, 16, 17, 33, 64, 80])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=30)
@given(
    T=st.integers(0, 150),
    S=st.integers(0, 150),
    window=st.tuples(sides, sides),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    D=widths,
    M=widths,
    padding=st.sampled_from(PADDINGS),
    dtype=dtypes,
    seed=st.integers(0, 9),
)
def test_is_as_exact_as_the_plain_form(T, S, window, heads, D, M, padding, dtype, seed):
    case = Case(T, S, window, 2, *heads, D, M, padding, seed=seed, dtype=dtype)
    assert_error_at_most_twice_that_of(others, form, case)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 100]), max_size=5).map(tuple),
    window=st.tuples(sides, sides),
    padding=st.sampled_from(PADDINGS),
    dtype=dtypes,
)
def test_packed_sequences_are_as_exact_as_the_plain_form(lengths, window, padding, dtype):
    case = Case(window=window, padding=padding, lengths=lengths, D=16, M=16, dtype=dtype)
    assert_error_at_most_twice_that_of(others, form, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(40, 0), (30, 30), (-1, 0)])
def test_is_on_average_as_exact_as_the_plain_form(window, dtype):
    cases = [Case(T=200, S=200, window=window, D=64, M=64, seed=seed, dtype=dtype) for seed in range(5)]
    found, expected = ([errors(f, case) for case in cases] for f in (form, plain))
    for name in found[0]:
        ours, theirs = (sum(error[name] for error in by_case) for by_case in (found, expected))
        assert ours <= 2 * theirs, f"{name}: {ours:g} against {theirs:g}"


@pytest.mark.parametrize(("window", "padding"), [((-1, 0), "none"), ((-1, 30), "scattered")])
def test_queries_with_more_keys_than_scores_are_held_of(window, padding):
    case = Case(T=150, S=2000, window=window, B=1, G=1, D=8, M=8, padding=padding, dtype=torch.float32)
    assert_error_at_most_twice_that_of(others, form, case, summed=case.S)


@pytest.mark.parametrize("padding", ["none", "scattered"])
@pytest.mark.parametrize("window", [(40, 0), (300, 20), (-1, -1)])
@pytest.mark.parametrize("lengths", [None, (700, 7, 290)])
def test_threads_share_heads_and_then_stretches_of_the_sequence(threads, window, lengths, padding):
    case = Case(1000, 900, window, 1, 1, 2, 16, 16, padding, lengths=lengths, dtype=torch.float32)
    alone = errors(form, case)
    threads(3)
    assert_error_at_most_twice_that_of(others, form, case)
    shared = errors(form, case)
    assert (shared["o"], shared["lse"], shared["dq"]) == (alone["o"], alone["lse"], alone["dq"])
    assert errors(form, case) == shared  # whichever thread comes first


@pytest.mark.parametrize(("D", "M"), [(256, 64), (64, 256), (300, 20)])
def test_wide_heads(D, M):
    case = Case(T=100, S=100, window=(30, 3), B=1, G=1, D=D, M=M, dtype=torch.float32)
    assert_error_at_most_twice_that_of(others, form, case)


@pytest.mark.parametrize("padded", [True, False])
def test_sequences_of_a_pack_cannot_change_one_bit_of_each_other(padded):
    offsets = torch.tensor([0, 70, 70, 201, 260], dtype=torch.int32)
    qkv = [torch.randn(1, 260, 2, 8, requires_grad=True) for _ in range(3)]
    padding = torch.rand(1, 260) < 0.3 if padded else None

    def run(qkv, span, **options):
        mask = None if padding is None else padding[:, span]
        o, lse = form(*qkv, window_size=(90, 5), return_lse=True, key_padding_mask=mask, **options)
        total = (o.sin() + lse.masked_fill(lse == -math.inf, 0).sin().unsqueeze(-1)).sum()
        return [o, lse, *torch.autograd.grad(total, qkv)]

    packed = run(qkv, slice(None), cu_seqlens=offsets)
    for first, end in ((0, 70), (70, 201), (201, 260)):
        alone = run([x[:, first:end].detach().requires_grad_() for x in qkv], slice(first, end))
        for x, y in zip(packed, alone, strict=True):
            assert torch.equal(x[:, first:end], y)


def test_a_view_of_a_projection_is_read_where_it_lies():
    H, D = 4, 16
    projected = torch.rand(2, 150, 3 * H * D)
    q, k, v = projected.view(2, 150, 3, H, D).unbind(2)
    assert not q.is_contiguous()
    expected = form(q.contiguous(), k.contiguous(), v.contiguous(), window_size=(20, 3))
    assert torch.equal(form(q, k, v, window_size=(20, 3)), expected)
    by_head = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(form(*by_head, window_size=(20, 3)), expected)
    by_feature = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
    assert torch.equal(form(*by_feature, window_size=(20, 3)), expected)


def test_keys_that_no_query_reads_get_no_gradient():
    q, k, v = (torch.randn(1, length, 1, 4, requires_grad=True) for length in (20, 100, 100))
    form(q, k, v, window_size=(9, 0)).sum().backward()
    for x in (k, v):
        assert not x.grad[:, :71].any()
        assert x.grad[:, 71:].any(-1).all()


def test_weights_far_below_the_largest_vanish_and_large_scores_do_not_overflow():
    q = torch.ones(1, 100, 1, 1)
    k = torch.linspace(-3e5, 3e5, 100).view(1, 100, 1, 1)
    v = torch.randn(1, 100, 1, 3)
    o, lse = form(q, k, v, window_size=(50, 0), return_lse=True)
    assert torch.equal(o, v)  # the last key, which is the largest, outweighs all others
    assert torch.equal(lse.flatten(), k.flatten())


def test_a_number_that_is_not_one_reaches_those_that_read_it():
    for name in "qkv":
        x = {n: torch.randn(1, 200, 1, 4) for n in "qkv"}
        x[name][0, 100, 0, 0] = math.nan
        o = form(**x, window_size=(7, 0))
        read = torch.zeros(200, dtype=torch.bool)
        read[100 : 101 if name == "q" else 108] = True
        assert o[0, read].isnan().any(-1).all()
        assert not o[0, :64].isnan().any()
        assert not o[0, 128:].isnan().any()
