"""Packed weights: rounded as documented, and multiplied as an fp64 product of the rounded numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import rounds_inputs_to_bf16
from torch.nn import functional as F  # noqa: N812

from unrolled.decode.builder import Builder
from unrolled.decode.packing import GROUP, PACKINGS, pack, rounded, unpack
from unrolled.decode.plan import Plan
from unrolled.models import DecoderConfig, DecoderState
from unrolled.ops import native

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)


STEPS = {"int8": 32767, "int4": 127}  # that the largest number of a row, or of a group, is rounded to


def parts(x, weights):
    """The numbers of x that are rounded together, filled up with zeros: [rows, parts, n]."""
    width = GROUP if weights == "int4" else x.shape[1]
    return F.pad(x, (0, -x.shape[1] % width)).unflatten(1, (-1, width))


def unrounded(rows, inputs, weights):
    """Draw rows whose numbers are not changed by the rounding."""
    if weights not in STEPS:
        x = torch.randn(rows, inputs)
        return x.bfloat16().float() if weights == "bf16" else x
    steps = STEPS[weights]
    whole = torch.randint(-steps, steps + 1, (rows, inputs)).float()
    whole[:, ::GROUP] = steps
    return whole / 2.0 ** torch.randint(0, 20, (rows, 1))


def product(x, w, bias, weights):
    """Compute x W^T + b by the kernel: a program that looks a row of x up and multiplies it."""
    builder = Builder(weights, torch.nn.Module())
    row = builder.embed(x, builder.value(x.shape[1]))
    program = builder.finish(1, row, builder.linear(row, w, bias, name="w"))
    config = DecoderConfig(vocab_size=len(w), d_model=x.shape[1], n_heads=1)
    plan = Plan(config, weights, program, DecoderState(torch.empty(0), ()))
    logits, rows = torch.full((len(x), len(w)), torch.nan), torch.arange(len(x))
    plan.read(rows, torch.zeros_like(rows), rows, [plan.init_state(1)], logits)
    return logits


@settings(max_examples=30)
@given(
    weights=st.sampled_from(list(PACKINGS)),
    inputs=st.integers(1, 200),
    outputs=st.integers(64, 200),
    rows=st.integers(1, 40),
    biased=st.booleans(),
    seed=st.integers(0, 999),
)
def test_products_are_those_of_the_rounded_numbers(weights, inputs, outputs, rows, biased, seed):
    torch.manual_seed(seed)
    x, w = unrounded(rows, inputs, weights), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    w[seed % outputs] = 0
    x[0] = 0
    exact = x.double() @ rounded(w, weights).double().T
    exact = exact if bias is None else exact + bias
    bound = 2e-6 * (x.double().abs() @ w.double().abs().T + 1)
    for instruction_set in native.instruction_sets():
        with native.use(instruction_set):
            found = product(x, w, bias, weights)
        assert ((found - exact).abs() <= bound).all(), instruction_set


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("weights", STEPS)
def test_inputs_are_rounded_to_the_nearest_step(weights, instruction_set):
    torch.manual_seed(0)
    x, w = torch.randn(50, 100), torch.randn(64, 100)
    x[0] *= 1e-36  # too small to be scaled to whole numbers
    x[1, :GROUP] *= 1e-40
    with native.use(instruction_set):
        found = product(x, w, None, weights)
    exact = x.double() @ rounded(w, weights).double().T
    step = parts(x, weights).abs().amax(2).double().clamp(min=2.0**-100) / STEPS[weights]
    size = parts(rounded(w, weights), weights).abs().sum(2).double()
    bound = 0.5 * step @ size.T
    assert ((found - exact).abs() <= 1.01 * bound).all()
    assert (found - exact).abs().max() >= 0.02 * bound.max()  # so they are rounded


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("rows", [1, 4, 5, 16])
def test_with_bf16_inputs_are_rounded_only_where_pairs_are_multiplied(rows, instruction_set):
    """On a matrix unit, an input is a sum of two bfloat16 numbers, to 2^-17 of its size."""
    torch.manual_seed(0)
    x, w = torch.randn(rows, 100), torch.randn(64, 100).bfloat16().float()
    with native.use(instruction_set):
        found = product(x, w, None, "bf16")
    pairs = instruction_set == "avx512" and rounds_inputs_to_bf16()
    expected = (x.bfloat16() if pairs else x).double() @ w.double().T
    bound = (2e-6 + 2**-17 * (not pairs)) * (x.double().abs() @ w.double().abs().T)
    assert ((found - expected).abs() <= bound).all()


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("weights", PACKINGS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_not_hidden(bad, weights, instruction_set):
    x, w = torch.randn(3, 70), torch.randn(64, 70).abs() + 1
    x[1, 33] = bad
    with native.use(instruction_set):
        y = product(x, w, None, weights)
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


@given(outputs=st.integers(1, 5), inputs=st.integers(1, 90), seed=st.integers(0, 999))
def test_rounding_is_to_the_nearest_number_of_a_grid(outputs, inputs, seed):
    torch.manual_seed(seed)
    w = torch.randn(outputs, inputs)
    assert torch.equal(rounded(w, "fp32"), w)
    torch.testing.assert_close(rounded(w, "bf16"), w, rtol=2**-8, atol=0)
    step = w.abs().amax(1, keepdim=True) / 127
    assert ((rounded(w, "int8") - w).abs() <= step * 0.5001).all()
    whole = rounded(w, "int8") / step
    assert (whole - whole.round()).abs().max() <= 127 * 2**-16  # a step has 17 bits
    for group, of_group in zip(w.split(GROUP, 1), rounded(w, "int4").split(GROUP, 1), strict=True):
        assert all(len(row.unique()) <= 16 for row in of_group)
        # Never worse than steps of an eighth of the largest weight, but for rounding a scale to bfloat16.
        bound = error(to_eighths(group), group).sqrt() + 2**-8 * group.norm(dim=1)
        assert (error(of_group, group).sqrt() <= bound).all()


@given(
    weights=st.sampled_from(list(PACKINGS)),
    inputs=st.integers(1, 90),
    outputs=st.integers(1, 130),
    size=st.sampled_from([1e-15, 1.0, 1e15]),
    seed=st.integers(0, 999),
)
def test_what_is_unpacked_is_what_was_rounded(weights, inputs, outputs, size, seed):
    torch.manual_seed(seed)
    w = size * torch.randn(outputs, inputs)
    w[seed % outputs] = 0
    packed = pack(w, None, weights)
    found = unpack(packed)
    assert torch.equal(found, rounded(w, weights))
    if weights != "int4":  # whose scales are fitted
        again = pack(found, None, weights).tensors()
        assert all(torch.equal(again[name], x) for name, x in packed.tensors().items())


@pytest.mark.parametrize("weights", PACKINGS)
def test_a_weight_may_have_any_strides(weights):
    w = torch.randn(64, 96)
    moved = w.T.contiguous().T
    assert torch.equal(unpack(pack(moved, None, weights)), unpack(pack(w, None, weights)))
    assert torch.equal(rounded(moved, weights), rounded(w, weights))


def test_a_weight_that_is_not_finite_stays_so():
    for bad in (torch.nan, torch.inf, torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)):
        w = torch.randn(2, 40)
        w[0, 3] = bad
        assert not rounded(w, "int8")[0, 3].isfinite()
        assert rounded(w, "int8")[1].isfinite().all()


def to_eighths(w):
    step = w.gather(1, w.abs().argmax(1, keepdim=True)) / -8
    return step * (w / step).round().clamp(-8, 7)


def error(found, exact):
    return (found - exact).square().sum(1)


def test_int4_rounds_by_least_squares():
    torch.manual_seed(0)
    w = torch.randn(2000, GROUP)
    scales = torch.linspace(-1.3, 1.3, 400) * w.abs().amax(1)[:, None, None] / 8
    best = (w[..., None] - scales * (w[..., None] / scales).round().clamp(-8, 7)).square().sum(1).amin(1)
    assert 1 <= (error(rounded(w, "int4"), w) / best).mean() < 1.04
    assert (error(to_eighths(w), w) / best).mean() > 1.1


def test_memory_is_what_the_form_says():
    w = torch.randn(640, 320)
    sizes = {weights: Builder(weights, torch.nn.Module()) for weights in PACKINGS}
    for builder in sizes.values():
        builder.linear(builder.value(320), w, None, name="w")
    found = {
        weights: sum(x.nbytes for x in builder.kept) * 8 / w.numel() for weights, builder in sizes.items()
    }
    assert found["fp32"] == 32
    assert found["bf16"] == 16
    assert 8 < found["int8"] < 8.3
    assert found["int4"] == 4.5


def test_sums_are_those_of_the_whole_numbers_of_each_output():
    packed = pack(torch.randn(70, 50), None, "int8")
    whole = unpack(packed) / packed.scales[:70, None]
    assert torch.equal(packed.sums[:70], whole.round().sum(1).int())
    assert not packed.sums[70:].any()
