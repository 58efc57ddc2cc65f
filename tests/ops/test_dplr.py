"""The rule of a diagonal plus low rank, against its definition in fp64."""

import math
from itertools import pairwise

import pytest
import torch
from exactness import assert_as_exact, rows_for
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_dplr import definition
from torch.nn.functional import normalize

from unrolled.ops.dplr import dplr, dplr_step

NAMES = ("q", "k", "v", "a", "b", "log_decay", "state")


def random_inputs(B=2, T=9, H=2, D=4, M=3, seed=0, dtype=torch.float64):
    """Inputs for which the state stays bounded: a erases at most what it reads."""
    generator = torch.Generator().manual_seed(seed)
    q, k, read, rate, pace = (torch.randn(B, T, H, D, generator=generator, dtype=dtype) for _ in range(5))
    v = torch.randn(B, T, H, M, generator=generator, dtype=dtype)
    state = torch.randn(B, H, D, M, generator=generator, dtype=dtype)
    a = normalize(read, dim=-1)
    return [q, k, v, a, -rate.sigmoid() * a, -pace.exp(), state]


def run(inputs, **options):
    *tokenwise, state = inputs
    return dplr(*tokenwise, state=state, **options)


@settings(max_examples=30)
@given(T=st.integers(0, 140), D=st.integers(1, 5), M=st.sampled_from([1, 3, 70]))
def test_chunks_equal_the_definition(T, D, M):
    inputs = random_inputs(1, T, 2, D, M)
    for found, expected in zip(run(inputs), definition(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_equal_those_of_the_definition():
    inputs = [x.requires_grad_() for x in random_inputs(T=45)]
    ours, theirs = run(inputs), definition(*inputs)
    seeds = [torch.randn_like(x) for x in ours]
    found = torch.autograd.grad(ours, inputs, seeds)
    for name, x, y in zip(NAMES, found, torch.autograd.grad(theirs, inputs, seeds), strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_second_derivatives():
    inputs = [x.requires_grad_() for x in random_inputs(1, 5, 1, 2, 2)]
    assert torch.autograd.gradgradcheck(lambda *inputs: run(inputs), inputs)


def test_errors_in_fp32_are_at_most_twice_those_of_the_recurrence():
    def steps(inputs, exact):
        inputs = [x.double() if exact else x.float() for x in inputs]
        return definition(*inputs)

    assert_as_exact(
        ("o", "state"),
        lambda seed: random_inputs(rows_for(8, 8), 200, 2, 8, 8, seed),
        1,
        definition=steps,
        ours=lambda inputs, exact: run([x.float() for x in inputs]),
        others=[steps],
        least=1,
    )


def test_a_gate_of_zero_clears_its_channel():
    inputs = random_inputs(T=70)
    inputs[5][:, 40, :, 1] = -math.inf
    expected = definition(*inputs)
    for found, x in zip(run(inputs), expected, strict=True):
        torch.testing.assert_close(found, x)


def test_padding_leaves_the_state_unchanged():
    inputs = random_inputs(T=12)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, :3] = padding[1, 5:8] = True
    with torch.no_grad():
        inputs[5][padding] = 3  # the logarithm of a gate above 1, which only a padded token may have
    o, state = run(inputs, key_padding_mask=padding)
    for row in range(2):
        kept = [x[row : row + 1, ~padding[row]] for x in inputs[:6]]
        expected, after = definition(*kept, inputs[6][row : row + 1])
        torch.testing.assert_close(o[row : row + 1, ~padding[row]], expected)
        torch.testing.assert_close(state[row : row + 1], after)
    assert not o[padding].any()


def test_packed_sequences_do_not_mix():
    inputs = random_inputs(1, 90)
    offsets = torch.tensor([0, 40, 40, 41, 90], dtype=torch.int32)
    inputs[6] = random_inputs(4, seed=1)[6]
    o, state = run(inputs, cu_seqlens=offsets)
    for row, (start, end) in enumerate(pairwise(offsets)):
        part = [x[:, start:end] for x in inputs[:6]]
        expected, after = definition(*part, inputs[6][row : row + 1])
        torch.testing.assert_close(o[:, start:end], expected)
        torch.testing.assert_close(state[row : row + 1], after)


def test_steps_continue_the_sequence():
    inputs = random_inputs()
    S = inputs[6]
    for t in range(9):
        o, S = dplr_step(*(x[:, t] for x in inputs[:6]), S)
        expected, after = definition(*(x[:, : t + 1] for x in inputs[:6]), inputs[6])
        torch.testing.assert_close(o, expected[:, -1])
    torch.testing.assert_close(S, after)


@pytest.mark.parametrize("name", ["k", "a", "b", "log_decay", "state"])
def test_a_wrong_shape_is_refused_by_name(name):
    inputs = random_inputs()
    inputs[NAMES.index(name)] = torch.zeros(2, 9, 2, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        run(inputs)


def test_half_precision_keeps_its_state_in_fp32():
    inputs = [x.bfloat16() for x in random_inputs()[:6]]
    o, state = dplr(*inputs)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
