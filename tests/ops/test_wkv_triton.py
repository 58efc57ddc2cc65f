"""The Triton kernels of the averages of RWKV-4, on a GPU or in Triton's interpreter."""

from functools import partial
from itertools import accumulate

import gpu_compiler
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import assert_as_exact_as_plain, check, differentiate, needs_triton
from wkv_in_pieces import in_pieces

from unrolled.ops.triton.check import Call, mistake
from unrolled.ops.wkv import empty_state, operator, plain, triton, wkv
from unrolled.ops.wkv.plain import Inputs

pytestmark = [needs_triton, pytest.mark.compilers]

NAMES = ["o", "state", "dk", "dv", "dlog_decay", "dbonus", "dstate"]


def draw(B, T, C, rows=None, dtype=torch.float32):
    """Keys, values, log decays of up to -4, bonuses and a state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=generator)

    k, v = (2 * normal(B, T, C)).to(dtype), normal(B, T, C).to(dtype)
    num, den, m = normal(3, B if rows is None else rows, C)
    log_decay, bonus = -normal(C).clamp(max=1.4).exp(), normal(C)
    state = torch.stack([num, den.exp(), m], 1)
    return {"k": k, "v": v, "log_decay": log_decay, "bonus": bonus, "state": state}


def equals_the_plain_form(run, drawn, **options):
    check(run, wkv, wkv, drawn, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_plain_form(run, dtype):
    equals_the_plain_form(run, draw(2, 70, 67, dtype=dtype))


@settings(max_examples=8)
@given(
    st.tuples(st.integers(0, 2), st.integers(0, 70), st.sampled_from([0, 1, 16, 70])),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_sizes_equal_the_plain_form(run, sizes, padded, empty, dtype):
    drawn = draw(*sizes, dtype=dtype)
    if empty:
        drawn["state"] = empty_state(sizes[0], sizes[2], drawn["state"])
    mask = torch.rand(sizes[:2], generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    equals_the_plain_form(run, drawn, key_padding_mask=mask)


@settings(max_examples=4)
@given(st.lists(st.sampled_from([0, 1, 2, 5, 40]), max_size=4))
def test_packed_sequences_do_not_mix(run, lengths):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    equals_the_plain_form(run, draw(1, sum(lengths), 3, len(lengths)), cu_seqlens=cu_seqlens)


def test_padding_before_the_first_token_changes_nothing(run):
    drawn = draw(2, 9, 5)
    drawn["state"] = empty_state(2, 5, drawn["state"])
    mask = torch.arange(9) < torch.tensor([[4], [9]])
    drawn["k"][mask] = drawn["v"][mask] = torch.nan
    found = run(differentiate, wkv, drawn, {"key_padding_mask": mask})
    assert not any(x[mask].any() for x in (found[0], *found[2:4]))
    alone = {name: x if name in ("log_decay", "bonus") else x[:1] for name, x in drawn.items()}
    short = alone | {"k": alone["k"][:, 4:], "v": alone["v"][:, 4:]}
    o, after = wkv(**short)
    torch.testing.assert_close(found[0][:1, 4:], o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][:1], after, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1][1], drawn["state"][1])


def test_gradients_at_padding_reach_nothing(run):
    inputs, mask = Inputs(**draw(2, 9, 5)), torch.arange(9) < torch.tensor([[4], [9]])
    grad_o, grad_state = torch.ones(2, 9, 5), torch.ones(2, 3, 5)
    spoiled = grad_o.masked_fill(mask.unsqueeze(-1), torch.nan)
    results = (run(triton._backward, x, grad_state, inputs, mask, None) for x in (spoiled, grad_o))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_the_last_sums_and_their_gradients_have_what_rounding_m_loses(run):
    inputs = Inputs(**draw(1, 100, 16))
    inputs.state[:, 2] += 1000  # all tokens have the weight 0 beside it
    o, after = run(triton._forward, inputs, None, None)
    found = run(triton._backward, torch.zeros_like(o), torch.ones_like(after), inputs, None, None)
    exact = inputs.state[:, 2].double() + 100 * inputs.log_decay.double()
    lost = (exact - after[:, 2]).exp().unsqueeze(1)
    assert (lost - 1).abs().max() > 1e-5
    torch.testing.assert_close(after[:, :2].double(), inputs.state[:, :2] * lost, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[4][:, :2].double(), lost.expand(1, 2, 16), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mean", [0, 80])
def test_a_slow_decay_keeps_its_digits(run, mean):
    drawn = draw(1, 500, 16)
    drawn["k"] += mean
    drawn["log_decay"] = torch.full_like(drawn["bonus"], -1e-3)
    drawn["state"][:, 2] += mean
    o, after, *_ = run(differentiate, wkv, drawn, {})
    exact, exact_after, *_ = differentiate(wkv, drawn, {}, "exact")
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=2e-6)
    mean_after, exact_mean = (x[:, 0].double() / x[:, 1] for x in (after, exact_after))
    torch.testing.assert_close(mean_after, exact_mean, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shift", [-1000, -80, 80, 1000])
def test_no_exponential_overflows(run, shift):
    drawn = draw(2, 40, 5)
    drawn["k"][:, 15:] += shift
    drawn["k"][0, 20:25] -= 2 * shift
    found, exact = run(differentiate, wkv, drawn, {}), differentiate(wkv, drawn, {}, "exact")
    for x, z in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), z, rtol=1e-3, atol=1e-3)


def test_steps_continue_the_sequence(run):
    drawn = draw(2, 7, 5)
    found = run(differentiate, in_pieces, drawn, {})
    own, exact = (differentiate(wkv, drawn, {}, backend) for backend in ("plain", "exact"))
    assert_as_exact_as_plain(NAMES, found, own, exact)


def test_reads_any_strides(run):
    drawn = draw(2, 9, 10)
    strided = {
        name: x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(2)[::2]
        for name, x in drawn.items()
    }
    results = (run(differentiate, wkv, x, {}) for x in (strided, drawn))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_what_the_kernels_cannot_do_is_left_to_another_form(run):
    inputs = Inputs(**draw(1, 3, 2))
    assert not triton.supports(inputs)  # not interpreted here
    assert run(triton.supports, inputs)
    assert not run(triton.supports, Inputs(*(x.double() for x in inputs)))


@pytest.mark.parametrize("lengths", [None, [0, 3, 3, 20]])
def test_the_plain_form_can_replace_kernels_inside_of_the_operator(monkeypatch, lengths):
    packs = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    drawn = draw(1, 20, 5, 1 if packs is None else 3)
    expected = differentiate(wkv, drawn, {"cu_seqlens": packs}, "plain")
    choices = iter([None])  # what decides about the operator, and then what it runs
    monkeypatch.setattr(operator, "_chosen", lambda *_: next(choices, plain))
    found = differentiate(wkv, drawn, {"cu_seqlens": packs})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "form"), [("forward", plain.forward), ("backward", plain.backward)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_check_at_first_use_passes_correct_kernels_only(run, kind, form, padded):
    call = Call("wkv", kind, torch.device("cpu"), torch.bfloat16, (), False, (padded,))
    kernels = partial(run, getattr(triton, f"_{kind}"))
    assert all(mistake(call, correct, triton._example) is None for correct in (form, kernels))
    found = mistake(call, lambda *arguments: [x + 1 for x in form(*arguments)], triton._example)
    assert found.startswith("makes a mistake in the ")


COMPILE = """
from unrolled.ops.wkv import triton as wkv_triton
from unrolled.ops.wkv.plain import Inputs

k, decay = torch.empty(1, 128, 256, dtype=torch.{dtype}), torch.empty(256)
inputs = Inputs(k, k, decay, decay, torch.empty(1, 3, 256))
for padding in (None, torch.zeros(1, 128, dtype=torch.bool)):
    wkv_triton.forward(inputs, padding, None)
    wkv_triton.backward(k, inputs.state, inputs, padding, None)
wkv_triton.forward(inputs, None, torch.zeros(2, dtype=torch.int32))
"""


@pytest.mark.parametrize(("capability", "dtype"), [(80, "float32"), (90, "bfloat16"), (100, "float16")])
def test_it_compiles_for_a_gpu_that_is_not_there(tmp_path, capability, dtype):
    found = gpu_compiler.needs(COMPILE.format(dtype=dtype), capability, tmp_path)
    assert {name: len(variants) for name, variants in found.items()} == {"scan": 5, "scan_back": 2}
    gpu_compiler.assert_fits(found)
