"""The C++ kernels of the delta rule, on every instruction set that this machine can run."""

from itertools import accumulate

import exactness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from unrolled.ops import native
from unrolled.ops.delta import delta_rule, delta_rule_reference, delta_rule_step
from unrolled.ops.delta import native as kernels
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.dispatch import prefer

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("instruction_set", "poisoned_memory")

NAMES = ["o", "state", "dq", "dk", "dv", "dbeta", "dlog_decay", "dstate"]


GATES = ["none", "heads", "channels", "strong"]


def inputs(sizes, dtype, seed, max_beta=2.0, rows=None, gates="heads"):
    """Queries, keys of length 1, values, rates, log gates and a state, in the type of the case.

    There is a gate for every head, or one for every channel of a key; these are "strong" if some are 0 and most
    others have a product beyond the range of fp32.
    """
    (B, T, G, P, D, M), generator = sizes, torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    keys, rates = normalize(normal(B, T, G, D), dim=-1), max_beta * normal(B, T, G).sigmoid()
    q, v, of_channels = normal(B, T, G * P, D), normal(B, T, G, M), gates in ("channels", "strong")
    log_decay = -0.3 * (normal(B, T, G, D) if of_channels else normal(B, T, G)).square()
    if gates == "strong":
        log_decay = (60 * log_decay).masked_fill(log_decay < -1, -torch.inf)
    found = [x.to(dtype) for x in (q, keys, v, rates, log_decay)]
    return [*found, normal(B if rows is None else rows, G, D, M)]


def results(form, given, cu_seqlens=None, gated=True, exact=False):
    """Outputs, and the gradients of a sum of both that weighs every element differently."""
    given = [(x.double() if exact else x).requires_grad_() for x in (x.detach() for x in given)]
    q, k, v, beta, log_decay, state = given
    options = {"log_decay": log_decay if gated else None, "cu_seqlens": cu_seqlens}
    outputs = form(q, k, v, beta, state=state, **options)
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.double)).sum() for x in outputs
    )
    # A pack of no sequences has a gradient too.
    loss = loss + 0 * sum(x.nan_to_num(neginf=0).sum() for x in given)
    return [
        *(x.detach() for x in outputs),
        *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True),
    ]


def plain(*args, **options):
    with prefer("plain"):
        return delta_rule(*args, **options)


def assert_as_exact(draw, draws=4, *, gates="heads", **options):
    """Our errors are at most twice those of the definition, or of the plain form, which has chunks as well.

    Chunks subtract nearly equal parts where the definition multiplies by 1 - b. A few numbers then make up most
    of the error of the gates' gradient, which is why strong gates are drawn four times.
    """

    def form(function):
        return lambda given, exact: results(function, given, exact=exact, gated=gates != "none", **options)

    definition = form(delta_rule_reference)
    others = [form(plain), definition]
    exactness.assert_as_exact(
        NAMES, draw, draws, definition=definition, ours=form(delta_rule), others=others, least=1
    )


widths = st.sampled_from([1, 3, 8, 16, 17, 33, 64, 80])


@settings(max_examples=12)
@given(
    st.integers(0, 70),
    st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    widths,
    widths,
    st.sampled_from(GATES),
    st.sampled_from([1.0, 2.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_is_as_exact_as_the_definition(T, heads, D, M, gates, max_beta, dtype):
    sizes, draws = (exactness.rows_for(D, M), T, *heads, D, M), 4 if gates == "strong" else 1
    assert_as_exact(lambda seed: inputs(sizes, dtype, seed, max_beta, gates=gates), draws=draws, gates=gates)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["heads", "channels"])
@pytest.mark.parametrize(("D", "M"), [(128, 64), (64, 130)])
def test_wide_heads(D, M, gates):
    assert_as_exact(lambda seed: inputs((1, 150, 1, 1, D, M), torch.float32, seed, gates=gates), gates=gates)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40]), max_size=5),
    widths,
    st.sampled_from(["heads", "channels"]),
)
def test_packed_sequences_are_as_exact_as_the_definition(lengths, M, gates):
    def draw(seed):
        return inputs((1, sum(lengths), 2, 1, 9, M), torch.float32, seed, rows=len(lengths), gates=gates)

    assert_as_exact(draw, gates=gates, cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


@pytest.mark.parametrize("gates", ["none", "heads"])
@pytest.mark.parametrize("lengths", [(300,), (135, 7, 0, 130)])
def test_the_backward_pass_keeps_only_a_few_states_of_a_long_sequence(gates, lengths):
    def draw(seed):
        return inputs((1, sum(lengths), 2, 2, 9, 20), torch.float32, seed, rows=len(lengths), gates=gates)

    assert_as_exact(draw, gates=gates, cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


@pytest.mark.parametrize("gates", ["heads", "channels"])
def test_threads_share_the_heads(threads, gates):
    given = inputs((2, 200, 3, 1, 64, 64), torch.float32, 0, gates=gates)
    threads(1)
    alone = results(delta_rule, given)
    threads(3)
    for ours, theirs in zip(results(delta_rule, given), alone, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_a_sequence_of_one_token(gates, dtype):
    q, k, v, beta, log_decay, state = inputs((300, 1, 2, 3, 33, 20), dtype, 0, gates=gates)
    log_decay = None if gates == "none" else log_decay
    before = state.clone()
    expected = delta_rule_reference(q, k, v, beta, log_decay=log_decay, state=state)
    token = [x[:, 0] for x in (q, k, v, beta)]
    o, S = delta_rule_step(*token, state, log_decay=None if log_decay is None else log_decay[:, 0])
    assert torch.equal(state, before)
    torch.testing.assert_close(o.unsqueeze(1), expected[0])
    torch.testing.assert_close(S, expected[1])


@pytest.mark.parametrize("gates", ["none", "heads", "channels"])
def test_it_is_a_sound_torch_operator(gates):
    given = [x.requires_grad_() for x in inputs((1, 20, 1, 2, 5, 3), torch.float32, 0, gates=gates)]
    given[4] = None if gates == "none" else given[4]
    torch.library.opcheck(torch.ops.unrolled.delta_rule_kernels.default, (*given, None))


@pytest.mark.parametrize("gates", ["heads", "channels"])
def test_second_derivatives_are_those_of_the_plain_form(gates):
    given = [x.requires_grad_() for x in inputs((1, 20, 1, 2, 5, 3), torch.float32, 0, gates=gates)]

    def second(form):
        q, k, v, beta, log_decay, state = given
        o, _ = form(q, k, v, beta, log_decay=log_decay, state=state)
        (first,) = torch.autograd.grad(o.square().sum(), k, create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    for ours, theirs in zip(second(delta_rule), second(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sizes", [(1, 7, 1, 2, 3, 2), (2, 70, 2, 1, 16, 16), (1, 65, 1, 1, 40, 70)])
def test_it_normalises_queries_and_keys_where_it_reads_them(sizes):
    q, k, *others = inputs(sizes, torch.float32, 0, max_beta=1.0)
    k = k * torch.linspace(0.1, 3, k.numel()).view(k.shape)
    unit_q, unit_k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-2).sqrt() for x in (q, k))
    v, beta, log_decay, state = (x.double() for x in others)
    exact = delta_rule_reference(0.5 * unit_q, unit_k, v, beta, log_decay=log_decay, state=state)
    found = kernels.forward(Inputs(q, k, *others), None, 1e-2, 0.5)
    torch.testing.assert_close(found, tuple(x.float() for x in exact), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gates", ["heads", "channels"])
def test_inputs_may_have_any_strides(gates):
    given = inputs((2, 20, 2, 1, 8, 6), torch.float32, 0, gates=gates)
    strided = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in given]
    for ours, theirs in zip(results(delta_rule, strided), results(delta_rule, given), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gates", ["none", "heads", "channels"])
def test_a_rate_above_1_changes_no_bit_before_it(gates):
    q, k, v, beta, log_decay, _ = inputs((1, 33, 2, 1, 24, 20), torch.float32, 0, max_beta=1.0, gates=gates)
    options = {} if gates == "none" else {"log_decay": log_decay}
    before, _ = delta_rule(q, k, v, beta, **options)
    for first in range(33):
        later = beta.clone()
        later[:, first:] += 0.9
        after, _ = delta_rule(q, k, v, later, **options)
        assert torch.equal(after[:, :first], before[:, :first])
        assert not torch.equal(after[:, first], before[:, first])
