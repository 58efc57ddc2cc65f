"""The averages of RWKV-4, against their definition, in plain PyTorch and in C++ on every instruction set."""

from functools import partial
from itertools import accumulate

import exactness
import pytest
import scans
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import results

from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.ops.packing import spans
from unrolled.ops.wkv import empty_state, wkv, wkv_step

NAMES = ["o", "state", "dk", "dv", "dlog_decay", "dbonus", "dstate"]
assert_close = partial(scans.assert_close, NAMES)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

needs_kernels = pytest.mark.skipif(not native.available(), reason=str(native.missing()))


def inputs(B, T, C, rows=None, dtype=torch.float64, seed=0):
    """Keys, values, log decays between -4 and -0.02, bonuses and a state."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size):
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    k, v = (2 * drawn(B, T, C)).to(dtype), drawn(B, T, C).to(dtype)
    num, den, m = drawn(3, B if rows is None else rows, C)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    others = (-drawn(C).clamp(-3, 1.4).exp(), drawn(C), torch.stack([num, den.exp(), m], 1))
    return [k, v, *(x.to(exact) for x in others)]


def definition(k, v, log_decay, bonus, *, state, key_padding_mask=None, cu_seqlens=None):
    """The explicit weight of each token in each average and in the last sums."""
    o, states = torch.zeros_like(v), []
    for n, (row, start, end) in enumerate(spans(cu_seqlens, *k.shape[:2])):
        tokens = torch.arange(start, end)
        if key_padding_mask is not None:
            tokens = tokens[~key_padding_mask[row, start:end]]
        keys, values = (x[row, tokens].to(state.dtype) for x in (k, v))
        num, den, m = state[n]
        number = torch.arange(len(tokens) + 1).unsqueeze(1)
        between = (number - 1 - number[:-1, 0]).unsqueeze(-1)
        exponents = torch.where(between < 0, keys + bonus, keys + between * log_decay)
        exponents = exponents.masked_fill(between < -1, -torch.inf)
        exponents = torch.cat([(m.detach() + number * log_decay).unsqueeze(1), exponents], 1)
        top = exponents.detach().amax(1)
        old, new = (exponents - top.unsqueeze(1)).exp().split([1, len(tokens)], 1)
        nums, dens = old[:, 0] * num + (new * values).sum(1), old[:, 0] * den + new.sum(1)
        o = o.index_put((torch.tensor(row), tokens), (nums[:-1] / dens[:-1]).to(o.dtype))
        states.append(torch.stack([nums[-1], dens[-1], top[-1]]))
    return o, torch.stack(states) if states else state


def plain(*given, **options):
    with prefer("plain"):
        return wkv(*given, **options)


sizes = st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from([0, 1, 5, 17]))


@settings(max_examples=30)
@given(sizes, st.booleans(), st.booleans())
def test_every_form_is_the_definition(sizes, padded, empty):
    given = inputs(*sizes)
    if empty:
        given[4] = empty_state(sizes[0], sizes[2], given[4])
    mask = torch.rand(sizes[:2], generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    expected = results(definition, given, key_padding_mask=mask)
    assert_close(results(wkv, given, key_padding_mask=mask), expected, 1e-12)
    assert_close(results(wkv, [x.float() for x in given], key_padding_mask=mask), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_the_plain_form_goes_from_chunk_to_chunk(padded):
    given = inputs(2, 600, 3)
    mask = torch.rand(2, 600) < 0.3 if padded else None
    expected = results(definition, given, key_padding_mask=mask)
    assert_close(results(plain, given, key_padding_mask=mask), expected, 1e-11)


@needs_kernels
@pytest.mark.parametrize("padding", [0.3, 0.97])
def test_the_kernel_goes_from_chunk_to_chunk_of_padding(padding, instruction_set):
    given = inputs(3, 150, 35)
    mask = torch.rand(3, 150, generator=torch.Generator().manual_seed(0)) < padding
    mask[1] = True
    expected = results(definition, given, key_padding_mask=mask)
    assert_close(results(wkv, [x.float() for x in given], key_padding_mask=mask), expected)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 70), max_size=4))
def test_packed_sequences_do_not_mix(lengths):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    given = inputs(1, sum(lengths), 3, rows=len(lengths))
    expected = results(definition, given, cu_seqlens=cu_seqlens)
    assert_close(results(wkv, given, cu_seqlens=cu_seqlens), expected, 1e-11)
    assert_close(results(wkv, [x.float() for x in given], cu_seqlens=cu_seqlens), expected, 1e-4)


def test_more_sequences_than_sums_of_the_gradients_of_decays_and_bonuses(instruction_set):
    given = inputs(40, 3, 5)
    assert_close(results(wkv, [x.float() for x in given]), results(plain, given))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("C", [130, 20, 9])
def test_the_kernel_is_as_exact_as_the_definition(dtype, C, instruction_set):
    def form(function):
        return lambda given, exact: results(function, given, exact=exact)

    exactness.assert_as_exact(
        NAMES,
        lambda seed: inputs(2, 100, C, dtype=dtype, seed=seed),
        2,
        definition=form(plain),
        ours=form(wkv),
        others=[form(plain), form(definition)],
        least=1,
    )


@pytest.mark.parametrize("form", [wkv, plain])
@pytest.mark.parametrize("mean", [0, 5, 80])
def test_a_slow_decay_keeps_its_digits(form, mean, instruction_set):
    k, v, _, bonus, _ = inputs(1, 3000, 16, dtype=torch.float32)
    given = [k + mean, v, torch.full_like(bonus, -1e-3), bonus]
    o, after = form(*given)
    tolerance = 2e-5 if form is plain else 2e-6
    exact, exact_after = plain(*(x.double() for x in given))
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=tolerance)
    mean_after, exact_mean = (x[:, 0].double() / x[:, 1] for x in (after, exact_after))
    torch.testing.assert_close(mean_after, exact_mean, rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", [wkv, plain])
@pytest.mark.parametrize("log_pace", [4, 12, 16, 18, 60, 88])
def test_a_fast_decay_leaves_the_tokens_that_follow(form, log_pace, instruction_set):
    """A sum over many tokens of such a decay has no digits left for a key."""
    k, v, _, bonus, state = inputs(2, 300, 5, dtype=torch.float32)
    given = [100 * k, v, -torch.full((5,), float(log_pace)).exp(), bonus, state]
    expected, _ = definition(*(x.double() for x in given[:4]), state=given[4].double())
    o, after = form(*given[:4], state=given[4])
    torch.testing.assert_close(o.double(), expected, atol=1e-3, rtol=1e-3)
    assert after.isfinite().all()


@pytest.mark.parametrize("form", [wkv, plain])
@pytest.mark.parametrize("shift", [-1000, -80, 80, 1000])
def test_no_exponential_overflows(form, shift, instruction_set):
    given = inputs(2, 40, 5, dtype=torch.float32)
    given[0][:, 15:] += shift
    given[0][0, 20:25] -= 2 * shift
    assert_close(results(form, given), results(definition, given, exact=True), 1e-3)
    one_by_one, state = [], given[4]
    for t in range(40):
        o, state = wkv_step(given[0][:, t], given[1][:, t], *given[2:4], state)
        one_by_one.append(o)
    torch.testing.assert_close(torch.stack(one_by_one, 1), form(*given[:4], state=given[4])[0])


@needs_kernels
def test_reads_any_strides(instruction_set):
    given = inputs(2, 50, 64, dtype=torch.float32)
    expected = results(wkv, given)
    strided = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in given]
    between = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in given]
    apart = [torch.stack([x, x], -1)[..., 0] for x in given]
    for each in (strided, between, apart):
        for ours, theirs in zip(results(wkv, each), expected, strict=True):
            assert torch.equal(ours, theirs)


@needs_kernels
def test_threads_share_the_channels(threads):
    given = inputs(2, 700, 200, dtype=torch.float32)
    threads(1)
    alone = results(wkv, given)
    threads(3)
    for ours, theirs in zip(results(wkv, given), alone, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_and_pieces_continue_the_sequence(dtype):
    k, v, log_decay, bonus, state = inputs(2, 7, 5, dtype=dtype)
    whole, after = wkv(k, v, log_decay, bonus, state=state)
    begin, between = wkv(k[:, :2], v[:, :2], log_decay, bonus, state=state)
    kept, os = between.clone(), [begin]
    for t in range(2, 7):
        o, new = wkv_step(k[:, t], v[:, t], log_decay, bonus, between)
        if t == 2:
            assert torch.equal(between, kept)
        os.append(o.unsqueeze(1))
        between = new
    torch.testing.assert_close(torch.cat(os, 1), whole)
    torch.testing.assert_close(between, after)


def test_a_step_has_the_gradients_of_a_sequence_of_one_token():
    k, v, *others = inputs(2, 1, 5, dtype=torch.float32)

    def step(k, v, log_decay, bonus, *, state):
        o, after = wkv_step(k[:, 0], v[:, 0], log_decay, bonus, state)
        return o.unsqueeze(1), after

    given = [k, v, *others]
    for ours, theirs in zip(results(step, given), results(wkv, given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_first_token_alone_is_its_value():
    k, v, log_decay, bonus, _ = inputs(2, 3, 5, dtype=torch.float32)
    o, _ = wkv(k, v, log_decay, bonus)
    torch.testing.assert_close(o[:, 0], v[:, 0])
    o, _ = wkv_step(k[:, 1], v[:, 1], log_decay, bonus, empty_state(2, 5, k))
    torch.testing.assert_close(o, v[:, 1])


def test_without_decay_and_bonus_it_is_a_causal_softmax():
    k, v, *_ = inputs(2, 50, 5)
    zero = k.new_zeros(5)
    causal = torch.ones(50, 50).tril().bool()
    weights = k.unsqueeze(1).expand(-1, 50, -1, -1).masked_fill(~causal[..., None], -torch.inf).softmax(2)
    torch.testing.assert_close(wkv(k, v, zero, zero)[0], (weights * v.unsqueeze(1)).sum(2))


@pytest.mark.parametrize(
    "mask",
    [[True, True, False, False, False], [False, False, True, True, True], [True, False, True, False, True]],
)
def test_what_stands_at_padding_reaches_nothing(mask, instruction_set):
    k, v, log_decay, bonus, _ = inputs(1, 5, 3, dtype=torch.float32)
    mask = torch.tensor([mask])
    spoiled = [z.masked_fill(mask.unsqueeze(-1), torch.nan).requires_grad_() for z in (k, v)]
    o, after = wkv(*spoiled, log_decay, bonus, key_padding_mask=mask)
    alone, alone_after = wkv(k[:, ~mask[0]], v[:, ~mask[0]], log_decay, bonus)
    torch.testing.assert_close(o[:, ~mask[0]], alone)
    assert not o[:, mask[0]].any()
    torch.testing.assert_close(after, alone_after)
    for grad in torch.autograd.grad(o.sum() + after.sum(), spoiled):
        assert grad.isfinite().all()
        assert not grad[mask].any()


@needs_kernels
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_a_sound_torch_operator(padded):
    given = [x.requires_grad_() for x in inputs(2, 9, 5, dtype=torch.float32)]
    padding = torch.rand(2, 9) < 0.4 if padded else None
    torch.library.opcheck(torch.ops.unrolled.wkv_kernels.default, (*given, padding, None))


class Averages(torch.nn.Module):
    def forward(self, *given):
        return wkv(*given)


@pytest.mark.slow
def test_it_is_one_operator_of_an_exported_graph_of_any_length():
    length = torch.export.Dim("length", max=1000)
    shapes = ({1: length}, {1: length}, None, None)
    program = torch.export.export(Averages(), tuple(inputs(2, 8, 5)[:4]), dynamic_shapes=(shapes,))
    assert sum("wkv" in str(node.target) for node in program.graph.nodes) == 1
    for T in (2, 70, 600):
        given = inputs(2, T, 5)[:4]
        torch.testing.assert_close(program.module()(*given), wkv(*given))


def test_second_derivatives_are_those_of_the_plain_form():
    given = [x.requires_grad_() for x in inputs(2, 9, 5, dtype=torch.float32)]

    def second(form):
        o, _ = form(*given[:4], state=given[4])
        (first,) = torch.autograd.grad(o.square().sum(), given[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    for ours, theirs in zip(second(wkv), second(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    *others, state = (x.detach().double().requires_grad_() for x in given)
    sums, m = state.detach()[:, :2].requires_grad_(), state.detach()[:, 2:]
    assert torch.autograd.gradcheck(
        lambda *xs: wkv(*xs[:4], state=torch.cat([xs[4], m], 1))[0], (*others, sums)
    )


WRONG = {
    r"k is torch.float64 of shape \[9, 5\], but must be floating point \[B, T, C\]": {
        "k": torch.zeros(9, 5).double()
    },
    r"v is torch.float64 of shape \[2, 9, 4\], but must be floating point \[2, 9, 5\]": {
        "v": torch.zeros(2, 9, 4).double()
    },
    r"log_decay is torch.float64 of shape \[4\], but must be floating point \[5\]": {
        "log_decay": torch.zeros(4).double()
    },
    r"bonus is torch.int64 of shape \[5\]": {"bonus": torch.zeros(5).long()},
    "log_decay is up to 0.25, but must be at most 0": {"log_decay": torch.full((5,), 0.25).double()},
    "log_decay is as low as -inf, but must be finite": {"log_decay": torch.full((5,), -torch.inf).double()},
    r"state is torch.float32 of shape \[2, 3, 5\], but must be torch.float64": {
        "state": torch.zeros(2, 3, 5)
    },
    "v is a float, but must be a tensor": {"v": 0.5, "key_padding_mask": torch.zeros(2, 9).bool()},
    "cu_seqlens packs sequences into one row, but there are 2": {
        "cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)
    },
    r"key_padding_mask has shape \[2, 8\]": {"key_padding_mask": torch.zeros(2, 8).bool()},
    "key_padding_mask was given with cu_seqlens": {
        "key_padding_mask": torch.zeros(2, 9).bool(),
        "cu_seqlens": torch.tensor([0, 9], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message):
    names = ("k", "v", "log_decay", "bonus", "state")
    arguments = dict(zip(names, inputs(2, 9, 5), strict=True)) | WRONG[message]
    with pytest.raises(ValueError, match=message):
        wkv(**arguments)


def test_a_step_names_wrong_input():
    k, v, log_decay, bonus, state = inputs(2, 1, 5)
    with pytest.raises(ValueError, match="k is a float, but must be a tensor"):
        wkv_step(0.5, v[:, 0], log_decay, bonus, state)
    with pytest.raises(ValueError, match=r"k is torch.float64 of shape \[2, 1, 5\], but must be .* \[B, C\]"):
        wkv_step(k, v[:, 0], log_decay, bonus, state)
    with pytest.raises(ValueError, match=r"v is torch.float64 of shape \[2, 4\], but must be .* \[2, 5\]"):
        wkv_step(k[:, 0], v[:, 0, :4], log_decay, bonus, state)
    with pytest.raises(ValueError, match="state is a NoneType, but must be a tensor"):
        wkv_step(k[:, 0], v[:, 0], log_decay, bonus, None)
    with pytest.raises(ValueError, match=r"state is torch.float64 of shape \[1, 3, 5\], but must be"):
        wkv_step(k[:, 0], v[:, 0], log_decay, bonus, state[:1])
