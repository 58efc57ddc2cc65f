"""The Triton kernels of the causal convolution, on a GPU or in Triton's interpreter."""

from functools import partial
from itertools import accumulate

import gpu_compiler
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import check, differentiate, needs_triton

from unrolled.ops.conv import causal_conv, causal_conv_reference, operator, plain, triton
from unrolled.ops.triton.check import Call, mistake

pytestmark = [needs_triton, pytest.mark.compilers]


def draw(B, T, C, W, rows=None, dtype=torch.float32, seed=0):
    """Tokens, taps, a bias and a state."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (B, T, C), (C, W), (C,), (B if rows is None else rows, W - 1, C)
    x, weight, bias, state = (torch.randn(size, generator=generator) for size in sizes)
    return {"x": x.to(dtype), "weight": weight.to(dtype), "bias": bias.to(dtype), "state": state}


def equals_the_definition(run, given, **options):
    check(run, causal_conv, causal_conv_reference, given, **options)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition(run, dtype, activation):
    equals_the_definition(run, draw(2, 70, 67, 4, dtype=dtype), activation=activation)


def test_the_bias_may_be_absent(run):
    given = draw(2, 70, 16, 4)
    del given["bias"]
    equals_the_definition(run, given, activation="silu")


@settings(max_examples=8)
@given(
    st.tuples(st.integers(0, 2), st.integers(0, 130), st.sampled_from([1, 16, 70]), st.integers(1, 5)),
    st.booleans(),
    st.sampled_from([None, "silu"]),
)
def test_any_sizes_equal_the_definition(run, sizes, padded, activation):
    mask = torch.rand(sizes[:2], generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    equals_the_definition(run, draw(*sizes), key_padding_mask=mask, activation=activation)


@settings(max_examples=4)
@given(st.lists(st.sampled_from([0, 1, 2, 5, 63, 64, 65]), max_size=4), st.sampled_from([1, 4]))
def test_packed_sequences_do_not_mix(run, lengths, W):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    given = draw(1, sum(lengths), 3, W, len(lengths))
    equals_the_definition(run, given, cu_seqlens=cu_seqlens, activation="silu")


def test_reads_any_strides(run):
    given = draw(2, 9, 10, 3)
    strided = {
        name: x.repeat_interleave(2)[::2] if name == "bias" else x.mT.contiguous().mT
        for name, x in given.items()
    }
    results = (run(differentiate, causal_conv, x, {}) for x in (strided, given))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_what_the_kernels_cannot_do_is_left_to_the_plain_form(run):
    def supports(*sizes, dtype=torch.float32):
        return run(triton.supports, *draw(*sizes, dtype=dtype).values())

    assert not triton.supports(*draw(1, 3, 2, 4).values())  # not interpreted here
    assert supports(1, 3, 2, 16)
    assert not supports(1, 3, 2, 17)
    assert not supports(1, 3, 2, 4, dtype=torch.float64)


@pytest.mark.parametrize("lengths", [None, [0, 3, 3, 20]])
def test_the_plain_form_can_replace_kernels_inside_of_the_operator(monkeypatch, lengths):
    packs = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    drawn = draw(1, 20, 5, 4, 1 if packs is None else 3)
    expected = differentiate(causal_conv, drawn, {"cu_seqlens": packs}, "plain")
    choices = iter([None])  # what decides about the operator, and then what it runs
    monkeypatch.setattr(operator, "_chosen", lambda *_: next(choices, plain))
    found = differentiate(causal_conv, drawn, {"cu_seqlens": packs})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "form"), [("forward", plain.forward), ("backward", plain.backward)])
def test_the_check_at_first_use_passes_correct_kernels_only(run, kind, form):
    call = Call(
        "the causal convolution", kind, torch.device("cpu"), torch.bfloat16, (), False, (4, True, True)
    )
    kernels = partial(run, getattr(triton, f"_{kind}"))
    assert all(mistake(call, correct, triton._example) is None for correct in (form, kernels))
    found = mistake(call, lambda *arguments: [x + 1 for x in form(*arguments)], triton._example)
    assert found.startswith("makes a mistake in the ")


COMPILE = """
from unrolled.ops.conv import triton as conv_triton

x, weight, state = torch.empty(1, 128, 256, dtype=torch.bfloat16), torch.empty(256, 4), torch.empty(1, 3, 256)
arguments = (x, weight, weight[:, 0], state, None, True)
conv_triton.forward(*arguments)
conv_triton.backward(x, state, *arguments)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_a_gpu_that_is_not_there(tmp_path, capability):
    found = gpu_compiler.needs(COMPILE, capability, tmp_path)
    assert len(found) == 5
    gpu_compiler.assert_fits(found)
