"""The Triton kernels of linear attention with a gate for every feature, on a GPU or in Triton's interpreter."""

from functools import partial
from itertools import accumulate

import gpu_compiler
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreted import check, differentiate, needs_triton

from unrolled.ops.gla import diagonal_linear_attention, diagonal_linear_attention_reference, packed, triton
from unrolled.ops.triton.check import Call, mistake

pytestmark = [needs_triton, pytest.mark.compilers]


def draw(T, *, B=2, G=1, P=1, R=8, M=7, strength=0.1, forgetting=False, dtype=torch.float32, rows=None):
    """Queries, keys, values, log gates, some of them -inf if `forgetting`, and a state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    gates = -strength * normal(B, T, G, R).square()
    if forgetting:
        gates.masked_fill_(torch.rand(gates.shape, generator=generator) < 0.1, -torch.inf)
    return {
        "q": normal(B, T, G * P, R).to(dtype),
        "k": normal(B, T, G, R).to(dtype),
        "v": normal(B, T, G, M).to(dtype),
        "log_decay": gates,
        "state": normal(B if rows is None else rows, G, R, M),
    }


def equals_the_definition(run, drawn, **options):
    """For 16 bits, the kernels round the state, and products of gates with queries and keys."""
    forms = diagonal_linear_attention, diagonal_linear_attention_reference
    check(run, *forms, drawn, rounded_factors=True, return_state=True, **options)


@pytest.mark.parametrize(("forgetting", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_equals_the_definition(run, forgetting, dtype):
    equals_the_definition(run, draw(66, B=1, P=2, forgetting=forgetting, dtype=dtype))


@settings(max_examples=4)
@given(
    T=st.integers(0, 100),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 1)]),
    R=st.integers(1, 36),
    M=st.integers(1, 36),
    strength=st.sampled_from([0.001, 0.1, 20.0]),
    forgetting=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@example(T=1, heads=(1, 1), R=5, M=8, strength=0.001, forgetting=True, dtype=torch.bfloat16)
def test_any_sizes_equal_the_definition(run, T, heads, R, M, strength, forgetting, dtype):
    G, P = heads
    drawn = draw(T, B=1, G=G, P=P, R=R, M=M, strength=strength, forgetting=forgetting, dtype=dtype)
    equals_the_definition(run, drawn)


@pytest.mark.parametrize(("R", "M"), [(256, 20), (20, 130)])
def test_wide_heads_are_worked_through_in_blocks(run, R, M):
    equals_the_definition(run, draw(20, B=1, R=R, M=M))


@settings(max_examples=3)
@given(st.lists(st.sampled_from([0, 1, 5, 64, 65]), max_size=3))
def test_packed_sequences_equal_the_definition(run, lengths):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    equals_the_definition(run, draw(sum(lengths), B=1, rows=len(lengths)), cu_seqlens=cu_seqlens)


def test_padded_keys_change_nothing(run):
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) < 0.4
    equals_the_definition(run, draw(70), key_padding_mask=mask)


def test_reads_any_strides(run):
    drawn = draw(20, G=2)
    strided = {name: x.movedim(-1, 0).contiguous().movedim(0, -1) for name, x in drawn.items()}
    options = {"return_state": True}
    results = (run(differentiate, diagonal_linear_attention, x, options) for x in (strided, drawn))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_gates_of_zero_forget_exactly(run):
    drawn = draw(70, B=1)
    drawn["log_decay"][0, 40] = -torch.inf
    other = {name: x.clone() for name, x in drawn.items()}
    for x in (other["k"], other["v"]):
        x[:, :40] *= 3
    options = {"return_state": True}
    results = [run(differentiate, diagonal_linear_attention, x, options) for x in (drawn, other)]
    assert all(x.isfinite().all() for found in results for x in found)
    for x, y in zip(*(found[:2] for found in results), strict=True):
        assert torch.equal(x[:, 40:], y[:, 40:]) if x.dim() == 4 and x.shape[1] == 70 else torch.equal(x, y)


@pytest.mark.parametrize(("kind", "form"), [("forward", packed.forward), ("backward", packed.backward)])
def test_the_check_at_first_use_passes_correct_kernels_only(run, kind, form):
    call = Call("attention", kind, torch.device("cpu"), torch.bfloat16, (8, 8), True, (2,))
    kernels = partial(run, getattr(triton, f"_{kind}"))
    assert all(mistake(call, correct, triton._example) is None for correct in (form, kernels))
    found = mistake(call, lambda *arguments: [x + 1 for x in form(*arguments)], triton._example)
    assert found.startswith("makes a mistake in the ")


COMPILE = """
from unrolled.ops.gla import triton as gla_triton
from unrolled.ops.gla.packed import Inputs

q, k, v = (torch.empty(1, 128, heads, {width}, dtype=torch.{dtype}) for heads in (4, 2, 2))
inputs = Inputs(q, k, v, torch.empty(1, 128, 2, {width}), torch.empty(1, 2, {width}, {width}))
gla_triton.forward(inputs, None)
gla_triton.backward(q, inputs.state, inputs, None)
"""


@pytest.mark.parametrize(
    ("capability", "dtype", "width"), [(80, "float32", 256), (90, "bfloat16", 128), (100, "float16", 64)]
)
def test_it_compiles_for_a_gpu_that_is_not_there(tmp_path, capability, dtype, width):
    found = gpu_compiler.needs(COMPILE.format(dtype=dtype, width=width), capability, tmp_path)
    assert len(found) == 7
    # `feature_gradients` with gates in fp32 spills 640 bytes, and 1,048 with Triton 3.8
    gpu_compiler.assert_fits(found, spilled=1100)
