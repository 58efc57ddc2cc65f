"""The C++ kernels of linear attention with a gate for every feature, on every instruction set of this machine."""

import platform
from functools import partial
from itertools import accumulate

import exactness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.ops import native
from unrolled.ops.delta import delta_rule
from unrolled.ops.dispatch import prefer
from unrolled.ops.dplr import dplr
from unrolled.ops.gla import (
    diagonal_linear_attention,
    diagonal_linear_attention_reference,
    diagonal_linear_attention_step,
)
from unrolled.ops.linear import LinearState, linear_attention, linear_attention_step

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("instruction_set", "poisoned_memory")

NAMES = ["o", "state", "dq", "dk", "dv", "dlog_decay", "dstate"]


def inputs(sizes, dtype, seed, strength=0.1, rows=None, forgetting=False):
    """Queries, keys and values in the type of the case; log gates, some -inf if `forgetting`; and a state."""
    (B, T, G, P, R, M), generator = sizes, torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    gates = -strength * normal(B, T, G, R).square()
    if forgetting:
        gates.masked_fill_(torch.rand(gates.shape, generator=generator) < 0.1, -torch.inf)
    tokens = [x.to(dtype) for x in (normal(B, T, G * P, R), normal(B, T, G, R), normal(B, T, G, M))]
    return [*tokens, gates, normal(B if rows is None else rows, G, R, M)]


def results(form, given, exact=False, **masks):
    """Outputs, and the gradients of a sum of both that weighs every element differently."""
    given = [(x.double() if exact else x).detach().requires_grad_() for x in given]
    q, k, v, log_decay, state = given
    outputs = form(q, k, v, log_decay, state=state, return_state=True, **masks)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.double) for x in outputs]
    loss = sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True))
    loss = loss + 0 * sum(x.nan_to_num(neginf=0).sum() for x in given)  # a pack of none has a gradient too
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, given)]


def assert_as_exact(draw, draws=4, **masks):
    def form(function):
        def finite(given, exact):
            found = results(function, given, exact=exact, **masks)
            assert all(x.isfinite().all() for x in found)
            return found

        return finite

    definition, ours = form(diagonal_linear_attention_reference), form(diagonal_linear_attention)
    exactness.assert_as_exact(
        NAMES, draw, draws, definition=definition, ours=ours, others=[definition], least=2 / 3
    )


widths = st.sampled_from([1, 3, 8, 16, 17, 33, 64, 80])


@settings(max_examples=15)
@given(
    st.integers(0, 70),
    st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    widths,
    widths,
    st.sampled_from([0.001, 0.1, 20.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_is_as_exact_as_the_definition(T, heads, R, M, strength, forgetting, dtype):
    sizes = (exactness.rows_for(R, M), T, *heads, R, M)
    assert_as_exact(lambda seed: inputs(sizes, dtype, seed, strength, forgetting=forgetting), draws=1)


@pytest.mark.parametrize(("R", "M"), [(128, 64), (64, 130)])
def test_wide_heads(R, M):
    assert_as_exact(lambda seed: inputs((1, 150, 1, 1, R, M), torch.float32, seed))


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 40]), max_size=5), widths)
def test_packed_sequences_are_as_exact_as_the_definition(lengths, M):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    sizes = (1, sum(lengths), 2, 1, 9, M)
    draw = partial(inputs, sizes, torch.float32, rows=len(lengths))
    draws = max(4, 16 - sum(lengths))  # a pack may have a single token
    assert_as_exact(draw, draws=draws, cu_seqlens=cu_seqlens)


def test_padded_keys_change_nothing():
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(0)) < 0.4
    assert_as_exact(lambda seed: inputs((2, 60, 2, 2, 9, 20), torch.float32, seed), key_padding_mask=mask)


def test_reads_any_strides():
    given = inputs((2, 50, 2, 1, 16, 32), torch.float32, 0)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:4]]
    last_first = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in given]
    expected = results(diagonal_linear_attention, given)
    for strided in ([*heads_first, given[4]], last_first):
        for x, y in zip(results(diagonal_linear_attention, strided), expected, strict=True):
            assert torch.equal(x, y)


def test_threads_share_the_heads(threads):
    given = inputs((2, 100, 3, 1, 64, 64), torch.float32, 0)
    threads(1)
    alone = results(diagonal_linear_attention, given)
    threads(3)
    for ours, theirs in zip(results(diagonal_linear_attention, given), alone, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_a_sequence_of_one_token(dtype):
    q, k, v, log_decay, state = inputs((300, 1, 2, 3, 33, 20), dtype, 0, forgetting=True)
    before = state.clone()
    o, after = diagonal_linear_attention_reference(q, k, v, log_decay, state=state, return_state=True)
    found, S = diagonal_linear_attention_step(*(x[:, 0] for x in (q, k, v, log_decay)), state)
    assert torch.equal(state, before)
    torch.testing.assert_close(found.unsqueeze(1), o)
    torch.testing.assert_close(S, after)


def test_it_is_a_sound_torch_operator():
    given = [x.requires_grad_() for x in inputs((1, 20, 1, 2, 5, 3), torch.float32, 0)]
    torch.library.opcheck(torch.ops.unrolled.diagonal_linear_attention.default, (*given, None))


def test_second_derivatives_are_those_of_the_plain_form():
    given = [x.requires_grad_() for x in inputs((1, 20, 1, 2, 5, 3), torch.float32, 0)]

    def second():
        q, k, v, log_decay, state = given
        o = diagonal_linear_attention(q, k, v, log_decay, state=state)
        (first,) = torch.autograd.grad(o.square().sum(), k, create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    ours = second()
    with prefer("plain"):
        theirs = second()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def by_features(q, k, v, gates):
    return diagonal_linear_attention(q, k, v, gates)


def by_heads(q, k, v, gates):
    return linear_attention(q, k, v, causal=True, log_decay=gates[..., 0], normalize=False)


def by_the_delta_rule(q, k, v, gates):
    return delta_rule(q, k, v, torch.ones_like(gates[..., 0]), log_decay=gates[..., 0])[0]


def by_low_rank(q, k, v, gates):
    return dplr(q, k, v, k.detach(), -k.detach(), gates)[0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors take no longer for such numbers")
@pytest.mark.parametrize("form", [by_features, by_heads, by_the_delta_rule, by_low_rank])
def test_what_gates_have_shrunk_becomes_0_before_it_is_slow(form):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(1, 3_000, 1, 16, generator=generator) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    gates = torch.full((1, 3_000, 1, 16), -0.1)
    grads = torch.autograd.grad(form(q, k, v, gates)[:, -1].sum(), (q, k, v))
    for x in grads:
        assert not ((x != 0) & (x.abs() < torch.finfo(torch.float32).tiny)).any()
    assert grads[1][:, -500:].any()
    assert (torch.tensor([1e-39]) * 1).item() > 0  # the setting of the processor is as before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors take no longer for such numbers")
def test_what_gates_shrink_step_by_step_becomes_0_too():
    x, state = (
        torch.zeros(1, 1, 8),
        LinearState(torch.full((1, 1, 8, 8), 2e-38), torch.full((1, 1, 8), 2e-38)),
    )
    gates = torch.full((1, 1, 8), -2.0)
    _, by_feature = diagonal_linear_attention_step(x, x, x, gates, state.kv)
    _, by_head = linear_attention_step(x, x, x, state, log_decay=gates[..., 0])
    assert not any(y.any() for y in (by_feature, *by_head))
    assert (torch.tensor([1e-39]) * 1).item() > 0
