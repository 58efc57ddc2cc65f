"""The C++ kernels of the rule of a diagonal plus low rank, on every instruction set of this machine."""

from functools import partial
from itertools import accumulate

import exactness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_dplr import definition
from torch.nn.functional import normalize

from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.ops.dplr import dplr, dplr_step
from unrolled.ops.packing import spans

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("instruction_set", "poisoned_memory")

NAMES = ["o", "state", "dq", "dk", "dv", "da", "db", "dlog_decay", "dstate"]


def inputs(sizes, dtype, seed, strength=0.1, rows=None, forgetting=False):
    """Inputs for which the state stays bounded, in the type of the case; some gates are 0 if `forgetting`."""
    (B, T, H, D, M), generator = sizes, torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    gates = -strength * normal(B, T, H, D).square()
    if forgetting:
        gates.masked_fill_(torch.rand(gates.shape, generator=generator) < 0.1, -torch.inf)
    a = normalize(normal(B, T, H, D), dim=-1)
    b = -2 * normal(B, T, H, D).sigmoid() * a
    tokens = [x.to(dtype) for x in (normal(B, T, H, D), normal(B, T, H, D), normal(B, T, H, M), a, b)]
    return [*tokens, gates, normal(B if rows is None else rows, H, D, M)]


def by_definition(*tokenwise, state, key_padding_mask=None, cu_seqlens=None):
    """The definition of every sequence, without its padded tokens.

    Like the kernels, it reads and writes half precision, but computes in fp32.
    """
    dtype = tokenwise[2].dtype
    tokenwise = [x.to(state.dtype) for x in tokenwise]
    if cu_seqlens is None and key_padding_mask is None:
        o, after = definition(*tokenwise, state)
        return o.to(dtype), after
    (B, T), o = tokenwise[0].shape[:2], torch.zeros_like(tokenwise[2])
    states = [state[:0]]
    for n, (row, start, end) in enumerate(spans(cu_seqlens, B, T)):
        tokens = torch.arange(start, end)
        if key_padding_mask is not None:
            tokens = tokens[~key_padding_mask[row]]
        part, after = definition(*(x[row, tokens].unsqueeze(0) for x in tokenwise), state[n : n + 1])
        o = o.index_put((torch.full_like(tokens, row), tokens), part[0])
        states.append(after)
    return o.to(dtype), torch.cat(states)


def results(form, given, exact=False, **masks):
    """Outputs, and the gradients of a sum of both that weighs every element differently."""
    given = [(x.double() if exact else x).detach().requires_grad_() for x in given]
    outputs = form(*given[:6], state=given[6], **masks)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.double) for x in outputs]
    loss = sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True))
    loss = loss + 0 * sum(x.nan_to_num(neginf=0).sum() for x in given)  # a pack of none has a gradient too
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, given)]


def plain(*given, **options):
    with prefer("plain"):
        return dplr(*given, **options)


def assert_as_exact(draw, draws=4, **masks):
    """Our errors are at most twice those of the definition, or of the plain form, which has chunks as well.

    Chunks subtract nearly equal parts where the definition multiplies by w + b a^T.
    """

    def form(function):
        def finite(given, exact):
            found = results(function, given, exact=exact, **masks)
            assert all(x.isfinite().all() for x in found)
            return found

        return finite

    exact, others = form(by_definition), [form(plain), form(by_definition)]
    exactness.assert_as_exact(NAMES, draw, draws, definition=exact, ours=form(dplr), others=others, least=1)


widths = st.sampled_from([1, 3, 8, 16, 17, 33, 64, 80])


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.integers(0, 70),
    st.sampled_from([1, 3]),
    widths,
    widths,
    st.sampled_from([0.001, 0.1, 20.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_is_as_exact_as_the_definition(T, H, D, M, strength, forgetting, dtype):
    sizes = (exactness.rows_for(D, M), T, H, D, M)
    assert_as_exact(lambda seed: inputs(sizes, dtype, seed, strength, forgetting=forgetting), draws=1)


@pytest.mark.slow
@pytest.mark.parametrize(("D", "M"), [(128, 64), (64, 130)])
def test_wide_heads(D, M):
    assert_as_exact(lambda seed: inputs((1, 150, 1, D, M), torch.float32, seed))


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 40]), max_size=5), widths)
def test_packed_sequences_are_as_exact_as_the_definition(lengths, M):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    sizes = (1, sum(lengths), 2, 9, M)
    draw = partial(inputs, sizes, torch.float32, rows=len(lengths))
    draws = max(4, 16 - sum(lengths))  # a pack may have a single token
    assert_as_exact(draw, draws=draws, cu_seqlens=cu_seqlens)


def test_padded_keys_change_nothing():
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(0)) < 0.4
    assert_as_exact(lambda seed: inputs((2, 60, 2, 9, 20), torch.float32, seed), key_padding_mask=mask)


def test_reads_any_strides():
    given = inputs((2, 50, 2, 16, 32), torch.float32, 0)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:6]]
    last_first = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in given]
    expected = results(dplr, given)
    for strided in ([*heads_first, given[6]], last_first):
        for x, y in zip(results(dplr, strided), expected, strict=True):
            assert torch.equal(x, y)


def test_threads_share_the_heads(threads):
    given = inputs((2, 100, 3, 64, 64), torch.float32, 0)
    threads(1)
    alone = results(dplr, given)
    threads(3)
    for ours, theirs in zip(results(dplr, given), alone, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_a_sequence_of_one_token(dtype):
    *tokenwise, state = inputs((300, 1, 3, 33, 20), dtype, 0, forgetting=True)
    before = state.clone()
    o, after = definition(*(x.float() for x in tokenwise), state)
    found, S = dplr_step(*(x[:, 0] for x in tokenwise), state)
    assert torch.equal(state, before)
    torch.testing.assert_close(found.unsqueeze(1), o.to(dtype))
    torch.testing.assert_close(S, after)


def test_it_is_a_sound_torch_operator():
    given = [x.requires_grad_() for x in inputs((1, 20, 2, 5, 3), torch.float32, 0)]
    torch.library.opcheck(torch.ops.unrolled.dplr_kernels.default, (*given, None))


def test_second_derivatives_are_those_of_the_plain_form():
    given = [x.requires_grad_() for x in inputs((1, 20, 2, 5, 3), torch.float32, 0)]

    def second(form):
        o, _ = form(*given[:6], state=given[6])
        (first,) = torch.autograd.grad(o.square().sum(), given[1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    for x, y in zip(second(dplr), second(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
