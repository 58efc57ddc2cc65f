"""The Triton kernels of the delta rule, on a GPU or in Triton's interpreter."""

from functools import partial
from itertools import accumulate

import gpu_compiler
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreted import check, differentiate, needs_triton
from plain_delta import definition
from torch.nn.functional import normalize

from unrolled.ops.delta import delta_rule, delta_rule_reference, operator, packed, triton
from unrolled.ops.triton.check import Call, mistake

pytestmark = [needs_triton, pytest.mark.compilers]


def draw(T, *, B=2, G=1, P=1, D=8, M=7, gated=True, max_beta=2.0, dtype=torch.float32, rows=None):
    """Queries, keys of length 1, values, rates, log gates and a state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "q": normal(B, T, G * P, D).to(dtype),
        "k": normalize(normal(B, T, G, D), dim=-1).to(dtype),
        "v": normal(B, T, G, M).to(dtype),
        "beta": max_beta * normal(B, T, G).sigmoid(),
        "log_decay": -0.3 * normal(B, T, G).square() if gated else None,
        "state": normal(B if rows is None else rows, G, D, M),
    }


def equals_the_definition(run, drawn, **options):
    # The plain form solves the triangular systems in fp64, and rounds no sums to 16 bits.
    check(run, delta_rule, delta_rule_reference, drawn, times=4, rounded_factors=True, **options)


@pytest.mark.parametrize(("gated", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_equals_the_definition(run, gated, dtype):
    equals_the_definition(run, draw(66, B=1, P=2, gated=gated, dtype=dtype))


def test_equals_explicit_matrices(run):
    drawn = draw(67, B=1)
    found = run(differentiate, delta_rule, drawn, {})
    exact = [x.double() for x in drawn.values()]
    torch.testing.assert_close(found[:2], tuple(x.float() for x in definition(*exact)), rtol=1e-5, atol=1e-5)


@settings(max_examples=4)
@given(
    T=st.integers(0, 140),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 1)]),
    D=st.integers(4, 36),
    M=st.integers(1, 36),
    gated=st.booleans(),
    max_beta=st.sampled_from([1.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@example(T=36, heads=(1, 1), D=4, M=33, gated=False, max_beta=2.0, dtype=torch.bfloat16)  # scores of up to 52
def test_any_sizes_equal_the_definition(run, T, heads, D, M, gated, max_beta, dtype):
    G, P = heads
    equals_the_definition(run, draw(T, B=1, G=G, P=P, D=D, M=M, gated=gated, max_beta=max_beta, dtype=dtype))


@pytest.mark.parametrize("max_beta", [1.0, 2.0])
def test_keys_that_repeat_cost_few_digits(run, max_beta):
    drawn = draw(140, B=1, D=1, M=3, gated=False, max_beta=max_beta)
    found = run(differentiate, delta_rule, drawn, {})
    exact = differentiate(delta_rule_reference, drawn, {}, "exact")
    for x, z in zip(found, exact, strict=True):
        torch.testing.assert_close(x, z.float(), rtol=0, atol=float(1e-5 * (1 + z.abs().max())))


@pytest.mark.parametrize(("D", "M"), [(256, 20), (20, 130)])
def test_wide_heads_are_worked_through_in_blocks(run, D, M):
    equals_the_definition(run, draw(20, B=1, D=D, M=M))


@settings(max_examples=3)
@given(st.lists(st.sampled_from([0, 1, 5, 64, 65]), max_size=3))
def test_packed_sequences_equal_the_definition(run, lengths):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    equals_the_definition(run, draw(sum(lengths), B=1, rows=len(lengths)), cu_seqlens=cu_seqlens)


def test_padded_tokens_change_nothing(run):
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) < 0.4
    equals_the_definition(run, draw(70), key_padding_mask=mask)


def test_reads_any_strides(run):
    drawn = draw(20, G=2)
    strided = {name: x.movedim(-1, 0).contiguous().movedim(0, -1) for name, x in drawn.items()}
    results = (run(differentiate, delta_rule, x, {}) for x in (strided, drawn))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_gate_of_zero_forgets_everything_before_it(run):
    drawn = draw(100, B=1)
    drawn["log_decay"][0, 70] = -torch.inf
    found = run(differentiate, delta_rule, drawn, {})
    assert all(x.isfinite().all() for x in found)
    late = {name: x[:, 70:] for name, x in drawn.items() if name != "state"}
    late["log_decay"] = late["log_decay"].clone()
    late["log_decay"][0, 0] = 0
    o, state = delta_rule(**late)
    torch.testing.assert_close(found[0][:, 70:], o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], state, rtol=1e-5, atol=1e-5)
    assert found[-2][0, 70] == 0  # the gradient of the gate


def test_gates_of_channels_are_left_to_another_form(run):
    drawn = draw(20, B=1)
    drawn["log_decay"] = -torch.rand(1, 20, 1, 8)
    ours = run(differentiate, delta_rule, drawn, {})
    torch.testing.assert_close(ours, differentiate(delta_rule, drawn, {}, "plain"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, [0, 3, 3, 20]])
def test_the_plain_form_can_replace_kernels_inside_of_the_operator(monkeypatch, lengths):
    packs = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    drawn = draw(20, B=1, rows=1 if packs is None else 3)
    expected = differentiate(delta_rule, drawn, {"cu_seqlens": packs}, "plain")
    choices = iter([None])  # what decides about the operator, and then what it runs
    monkeypatch.setattr(operator, "_chosen", lambda *_: next(choices, packed))
    found = differentiate(delta_rule, drawn, {"cu_seqlens": packs})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "form"), [("forward", packed.forward), ("backward", packed.backward)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_check_at_first_use_passes_correct_kernels_only(run, kind, form, gated):
    call = Call("the delta rule", kind, torch.device("cpu"), torch.bfloat16, (8, 8), gated, (2,))
    kernels = partial(run, getattr(triton, f"_{kind}"))
    assert all(mistake(call, correct, triton._example) is None for correct in (form, kernels))
    found = mistake(call, lambda *arguments: [x + 1 for x in form(*arguments)], triton._example)
    assert found.startswith("makes a mistake in the ")


COMPILE = """
from unrolled.ops.delta import triton as delta_triton
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.linear import triton_launch

triton_launch.launch = lambda *_, **__: None  # its kernels have a test of their own

q, k, v = (torch.empty(1, 128, heads, {width}, dtype=torch.{dtype}) for heads in (4, 2, 2))
beta, log_decay, state = torch.empty(1, 128, 2), torch.empty(1, 128, 2), torch.empty(1, 2, {width}, {width})
inputs = Inputs(q, k, v, beta, log_decay, state)
delta_triton.forward(inputs, None)
delta_triton.backward(q, state, inputs, None)
"""


@pytest.mark.parametrize(
    ("capability", "dtype", "width"), [(80, "float32", 256), (90, "bfloat16", 64), (100, "float16", 64)]
)
def test_it_compiles_for_a_gpu_that_is_not_there(tmp_path, capability, dtype, width):
    found = gpu_compiler.needs(COMPILE.format(dtype=dtype, width=width), capability, tmp_path)
    assert set(found) == {
        "inverses",
        "corrections",
        "scan",
        "scan_back",
        "correction_gradients",
        "key_gradients",
    }
    gpu_compiler.assert_fits(found, spilled=384)
