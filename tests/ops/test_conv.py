"""The short causal convolution, against torch's own and against its definition."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, pad, silu

from unrolled.ops.conv import causal_conv, causal_conv_reference, causal_conv_step
from unrolled.ops.dispatch import prefer

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def inputs(B, T, C, W, rows=None, dtype=torch.float64, seed=0):
    """Tokens, taps, a bias and a state."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (B, T, C), (C, W), (C,), (B if rows is None else rows, W - 1, C)
    *given, state = (torch.randn(*size, dtype=torch.float64, generator=generator) for size in sizes)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return [*(x.to(dtype) for x in given), state.to(state_dtype)]


def results(form, given, exact=False, **options):
    """Outputs, and the gradients of a sum of both that weighs every element differently."""
    given = [(x.double() if exact else x).detach().requires_grad_() for x in given]
    x, weight, bias, state = given
    outputs = form(x, weight, bias=bias, state=state, **options)
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.double)).sum() for x in outputs
    )
    loss = loss + 0 * sum(x.sum() for x in given)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, given)]


def plain(*args, **options):
    with prefer("plain"):
        return causal_conv(*args, **options)


def test_it_is_the_convolution_of_torch():
    x, weight, bias, _ = inputs(2, 20, 5, 4)
    for b, activation in ((None, None), (bias, None), (None, "silu"), (bias, "silu")):
        z = conv1d(pad(x.mT, (3, 0)), weight.unsqueeze(1), b, groups=5).mT
        expected = z if activation is None else silu(z)
        y, _ = causal_conv(x, weight, bias=b, activation=activation)
        torch.testing.assert_close(y, expected)
        b = None if b is None else b.float()
        y, _ = causal_conv(x.float(), weight.float(), bias=b, activation=activation)
        torch.testing.assert_close(y, expected.float())


sizes = st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from([1, 16, 35]), st.integers(1, 5))
activations = st.sampled_from([None, "silu"])


@settings(max_examples=30)
@given(sizes, st.booleans(), activations)
def test_every_form_is_the_definition(sizes, padded, activation):
    given = inputs(*sizes)
    mask = torch.rand(sizes[:2], generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    options = {"key_padding_mask": mask, "activation": activation}
    expected = results(causal_conv_reference, given, **options)
    for found in (
        results(causal_conv, given, **options),
        results(causal_conv, [x.float() for x in given], **options),
    ):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [causal_conv, plain])
def test_a_state_does_not_keep_the_inputs_in_memory(form):
    _, state = form(*inputs(1, 500, 8, 4)[:2])
    assert state.untyped_storage().nbytes() == state.numel() * state.itemsize


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 5), activations)
def test_packed_sequences_do_not_mix(lengths, W, activation):
    options = {
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "activation": activation,
    }
    given = inputs(1, sum(lengths), 3, W, rows=len(lengths))
    expected = results(causal_conv_reference, given, **options)
    for dtype in (torch.float64, torch.float32):
        found = results(causal_conv, [x.to(dtype) for x in given], **options)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs.to(dtype), rtol=1e-5, atol=1e-5)


def test_one_long_sequence_among_many_short_ones(instruction_set):
    lengths = [1, 2] * 40 + [1_200] + [0, 1] * 40
    options = {
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "activation": "silu",
    }
    given = inputs(1, sum(lengths), 3, 4, rows=len(lengths))
    expected = results(plain, given, **options)
    found = results(causal_conv, [x.float() for x in given], **options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)


def test_many_taps_reach_over_several_blocks_of_the_kernel(instruction_set):
    given = inputs(1, 600, 130, 70)
    expected = results(plain, given, activation="silu")
    found = results(causal_conv, [x.float() for x in given], activation="silu")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_as_exact_as_the_plain_form(dtype, activation, instruction_set):
    total = {form: torch.zeros(6, dtype=torch.double) for form in (causal_conv, plain)}
    for seed in range(3):
        given = inputs(2, 600, 20, 4, dtype=dtype, seed=seed)  # more tokens than one task of the kernel has
        exact = results(plain, given, exact=True, activation=activation)
        for form, sums in total.items():
            found = results(form, given, activation=activation)
            sums += torch.stack(
                [(x.double() - z).norm() / z.norm() for x, z in zip(found, exact, strict=True)]
            )
    ours, theirs = total.values()
    assert (ours <= 2 * theirs).all(), (ours, theirs)


def test_taps_may_have_another_type_than_the_tokens():
    x, weight, bias, state = inputs(2, 9, 5, 4)
    options = {"bias": bias, "state": state}
    for ours, theirs in zip(
        causal_conv(x.float(), weight, **options), causal_conv(x, weight, **options), strict=True
    ):
        torch.testing.assert_close(ours, theirs.to(ours.dtype))


def test_steps_and_pieces_continue_the_sequence():
    x, weight, bias, state = inputs(2, 7, 3, 4)
    options = {"bias": bias, "activation": "silu"}
    whole, after = causal_conv(x, weight, state=state, **options)
    begin, between = causal_conv(x[:, :2], weight, state=state, **options)
    kept, outs = between.clone(), [begin]
    for t in range(2, 7):
        y, new = causal_conv_step(x[:, t], weight, between, **options)
        outs.append(y.unsqueeze(1))
        between = new
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    torch.testing.assert_close(between, after)
    assert torch.equal(kept, causal_conv(x[:, :2], weight, state=state)[1])


def test_what_stands_at_padding_reaches_nothing():
    x, weight, bias, state = inputs(1, 8, 3, 4, dtype=torch.float32)
    options = {"bias": bias, "activation": "silu", "state": state}
    mask = torch.tensor([[True, False, False, True, False, True, False, True]])
    spoiled = x.masked_fill(mask.unsqueeze(-1), torch.nan).requires_grad_()
    y, after = causal_conv(spoiled, weight, key_padding_mask=mask, **options)
    alone, alone_after = causal_conv(x[:, ~mask[0]], weight, **options)
    assert torch.equal(y[:, ~mask[0]], alone)
    assert not y[:, mask[0]].any()
    assert torch.equal(after, alone_after)
    (grad,) = torch.autograd.grad(y.sum() + after.sum(), spoiled)
    assert grad.isfinite().all()
    assert not grad[mask].any()


def test_a_view_of_a_projection_is_read_where_it_lies():
    wide = torch.randn(2, 9, 10)
    weight = torch.randn(4, 3)
    assert torch.equal(causal_conv(wide[..., 3:7], weight)[0], causal_conv(wide[..., 3:7].clone(), weight)[0])


@pytest.mark.parametrize(("biased", "activated"), [(False, False), (True, True)])
def test_it_is_a_sound_torch_operator(biased, activated):
    x, weight, bias, state = (x.requires_grad_() for x in inputs(2, 9, 5, 4, dtype=torch.float32))
    arguments = (x, weight, bias if biased else None, state, None, activated)
    torch.library.opcheck(torch.ops.unrolled.causal_conv.default, arguments)


def test_second_derivatives_are_those_of_the_plain_form():
    given = [x.requires_grad_() for x in inputs(2, 9, 5, 4, dtype=torch.float32)]

    def second(form):
        x, weight, bias, state = given
        y, _ = form(x, weight, bias=bias, state=state, activation="silu")
        (first,) = torch.autograd.grad(y.square().sum(), given[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    for ours, theirs in zip(second(causal_conv), second(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


WRONG = {
    r"x is torch.float64 of shape \[9, 5\], but must be floating point \[B, T, C\]": {
        "x": torch.zeros(9, 5).double()
    },
    r"weight has shape \[4, 4\], but must be \[5, W\] for x": {"weight": torch.zeros(4, 4).double()},
    r"weight has shape \[5, 0\]": {"weight": torch.zeros(5, 0).double()},
    r"bias is torch.float64 of shape \[4\], but must be floating point \[5\]": {
        "bias": torch.zeros(4).double()
    },
    "activation is 'relu', but must be 'silu' or None": {"activation": "relu"},
    r"state is torch.float32 of shape \[2, 3, 5\], but must be torch.float64": {
        "state": torch.zeros(2, 3, 5)
    },
    "key_padding_mask was given with cu_seqlens": {
        "key_padding_mask": torch.zeros(2, 9).bool(),
        "cu_seqlens": torch.tensor([0, 9], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message):
    x, weight, _, state = inputs(2, 9, 5, 4)
    arguments = {"x": x, "weight": weight, "state": state} | WRONG[message]
    with pytest.raises(ValueError, match=message):
        causal_conv(arguments.pop("x"), arguments.pop("weight"), **arguments)
