"""The selective scan, against its definition, in plain PyTorch and in C++ on every instruction set."""

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
from unrolled.ops.selective_scan import selective_scan, selective_scan_step

NAMES = ["y", "state", "dx", "ddt", "da", "db", "dc", "dstate"]
assert_close = partial(scans.assert_close, NAMES)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

needs_kernels = pytest.mark.skipif(not native.available(), reason=str(native.missing()))


def inputs(B, T, C, N, rows=None, dtype=torch.float64, seed=0):
    """Tokens, step sizes, rates as Mamba initialises them, writers, readers and a state."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size):
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    x, b, c = (drawn(B, T, width).to(dtype) for width in (C, N, N))
    dt, a = torch.nn.functional.softplus(drawn(B, T, C) - 2), -drawn(C, N).exp() * torch.arange(1, N + 1)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return [x, dt.to(exact), a.to(exact), b, c, drawn(B if rows is None else rows, C, N).to(exact)]


def definition(x, dt, a, b, c, *, state, key_padding_mask=None, cu_seqlens=None):
    """The recurrence, token by token."""
    ys, states = [x.new_zeros(()).expand(x.shape[2]).clone() for _ in range(x.shape[0] * x.shape[1])], []
    for n, (row, start, end) in enumerate(spans(cu_seqlens, *x.shape[:2])):
        h = state[n]
        for t in range(start, end):
            if key_padding_mask is not None and key_padding_mask[row, t]:
                continue
            written = torch.outer((dt[row, t] * x[row, t]).to(h.dtype), b[row, t].to(h.dtype))
            h = (dt[row, t].unsqueeze(-1) * a).exp() * h + written
            ys[row * x.shape[1] + t] = (h @ c[row, t].to(h.dtype)).to(x.dtype)
        states.append(h)
    y = torch.stack(ys).reshape(x.shape) if ys else x
    return y, torch.stack(states) if states else state


def plain(*given, **options):
    with prefer("plain"):
        return selective_scan(*given, **options)


sizes = st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from([0, 1, 5, 17]), st.integers(0, 3))


@settings(max_examples=30)
@given(sizes, st.booleans())
def test_every_form_is_the_definition(sizes, padded):
    given = inputs(*sizes)
    mask = torch.rand(sizes[:2], generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    expected = results(definition, given, key_padding_mask=mask)
    assert_close(results(selective_scan, given, key_padding_mask=mask), expected, 1e-12)
    assert_close(results(selective_scan, [x.float() for x in given], key_padding_mask=mask), expected)


def test_the_plain_form_goes_from_chunk_to_chunk():
    given = inputs(2, 150, 3, 4)
    assert_close(results(plain, given), results(definition, given), 1e-11)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 70), max_size=4))
def test_packed_sequences_do_not_mix(lengths):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    given = inputs(1, sum(lengths), 3, 4, rows=len(lengths))
    expected = results(definition, given, cu_seqlens=cu_seqlens)
    assert_close(results(selective_scan, given, cu_seqlens=cu_seqlens), expected, 1e-11)
    assert_close(results(selective_scan, [x.float() for x in given], cu_seqlens=cu_seqlens), expected, 1e-4)


def test_more_sequences_than_sums_of_the_gradients_of_the_rates(instruction_set):
    given = inputs(40, 3, 5, 4)
    assert_close(results(selective_scan, [x.float() for x in given]), results(plain, given))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("C", "N"), [(130, 16), (20, 3), (9, 33)])
def test_the_kernel_is_as_exact_as_the_definition(dtype, C, N, instruction_set):
    def form(function):
        return lambda given, exact: results(function, given, exact=exact)

    exactness.assert_as_exact(
        NAMES,
        lambda seed: inputs(2, 100, C, N, dtype=dtype, seed=seed),
        2,
        definition=form(plain),
        ours=form(selective_scan),
        others=[form(plain), form(definition)],
        least=1,
    )


@needs_kernels
def test_reads_any_strides(instruction_set):
    given = inputs(2, 50, 16, 8, dtype=torch.float32)
    expected = results(selective_scan, given)
    strided = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in given]
    between = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in given]
    for each in (strided, between):
        for ours, theirs in zip(results(selective_scan, each), expected, strict=True):
            assert torch.equal(ours, theirs)


@needs_kernels
def test_threads_share_the_channels(threads):
    given = inputs(2, 300, 200, 16, dtype=torch.float32)
    threads(1)
    alone = results(selective_scan, given)
    threads(3)
    for ours, theirs in zip(results(selective_scan, given), alone, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_and_pieces_continue_the_sequence(dtype):
    *tokens, state = inputs(2, 7, 5, 4, dtype=dtype)
    x, dt, a, b, c = tokens
    whole, after = selective_scan(*tokens, state=state)
    begin, between = selective_scan(x[:, :2], dt[:, :2], a, b[:, :2], c[:, :2], state=state)
    kept, ys = between.clone(), [begin]
    for t in range(2, 7):
        y, new = selective_scan_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], between)
        if t == 2:
            assert torch.equal(between, kept)
        ys.append(y.unsqueeze(1))
        between = new
    torch.testing.assert_close(torch.cat(ys, 1), whole)
    torch.testing.assert_close(between, after)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("C", "N"), [(130, 16), (20, 3), (9, 33), (300, 1)])
def test_a_step_of_the_kernel_is_the_definition(dtype, C, N, instruction_set, threads):
    x, dt, a, b, c, state = inputs(3, 2, C, N, dtype=dtype)
    exact = [z[:, 1:].double() for z in (x, dt)], a.double(), [z[:, 1:].double() for z in (b, c)]
    expected, after = definition(*exact[0], exact[1], *exact[2], state=state.double())
    for n in (1, 3):
        threads(n)
        y, new = selective_scan_step(x[:, 1], dt[:, 1], a, b[:, 1], c[:, 1], state)
        torch.testing.assert_close(y, expected[:, 0].to(dtype))
        torch.testing.assert_close(new, after.float())


def test_a_step_has_the_gradients_of_a_scan():
    given = inputs(2, 1, 5, 4)
    found = []
    for run in (selective_scan, selective_scan_step):
        x, dt, a, b, c, state = (z.clone().requires_grad_() for z in given)
        tokens = (x, dt, a, b, c) if run is selective_scan else (x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0])
        y, after = run(*tokens, state=state)
        (y.sum() + after.square().sum()).backward()
        found.append([z.grad for z in (x, dt, a, b, c, state)])
    torch.testing.assert_close(*found)


def test_what_stands_at_padding_reaches_nothing():
    x, dt, a, b, c, _ = inputs(1, 8, 3, 4, dtype=torch.float32)
    mask = torch.tensor([[True, False, False, True, False, True, False, True]])
    spoiled = [z.masked_fill(mask.unsqueeze(-1), torch.nan).requires_grad_() for z in (x, dt, b, c)]
    with torch.no_grad():
        spoiled[1][:, 0] = -1.0
    y, after = selective_scan(*spoiled[:2], a, *spoiled[2:], key_padding_mask=mask)
    alone, alone_after = selective_scan(*(z[:, ~mask[0]] for z in (x, dt)), a, b[:, ~mask[0]], c[:, ~mask[0]])
    torch.testing.assert_close(y[:, ~mask[0]], alone)
    assert not y[:, mask[0]].any()
    torch.testing.assert_close(after, alone_after)
    for grad in torch.autograd.grad(y.sum() + after.sum(), spoiled):
        assert grad.isfinite().all()
        assert not grad[mask].any()


@needs_kernels
def test_it_is_a_sound_torch_operator():
    given = [x.requires_grad_() for x in inputs(2, 9, 5, 4, dtype=torch.float32)]
    torch.library.opcheck(torch.ops.unrolled.selective_scan_kernels.default, (*given, None))


class Scan(torch.nn.Module):
    def forward(self, *given):
        return selective_scan(*given)


@pytest.mark.slow
def test_it_is_one_operator_of_an_exported_graph_of_any_length():
    length = torch.export.Dim("length", max=1000)
    shapes = ({1: length}, {1: length}, None, {1: length}, {1: length})
    program = torch.export.export(Scan(), tuple(inputs(2, 8, 5, 4)[:5]), dynamic_shapes=(shapes,))
    assert sum("selective_scan" in str(node.target) for node in program.graph.nodes) == 1
    for T in (2, 70, 200):
        given = inputs(2, T, 5, 4)[:5]
        torch.testing.assert_close(program.module()(*given), selective_scan(*given))


def test_second_derivatives_are_those_of_the_plain_form():
    given = [x.requires_grad_() for x in inputs(2, 9, 5, 4, dtype=torch.float32)]

    def second(form):
        y, _ = form(*given[:5], state=given[5])
        (first,) = torch.autograd.grad(y.square().sum(), given[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    for ours, theirs in zip(second(selective_scan), second(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.autograd.gradcheck(
        lambda *xs: selective_scan(*xs[:5], state=xs[5]), [x.double() for x in given]
    )


WRONG = {
    r"x is torch.float64 of shape \[9, 5\], but must be floating point \[B, T, C\]": {
        "x": torch.zeros(9, 5).double()
    },
    r"dt is torch.float64 of shape \[2, 9, 4\], but must be floating point \[2, 9, 5\]": {
        "dt": torch.zeros(2, 9, 4).double()
    },
    r"a is torch.float64 of shape \[5\], but must be floating point \[C, N\]": {"a": torch.zeros(5).double()},
    r"b is torch.int64 of shape \[2, 9, 4\]": {"b": torch.zeros(2, 9, 4).long()},
    r"c is torch.float64 of shape \[2, 9, 3\], but must be floating point \[2, 9, 4\]": {
        "c": torch.zeros(2, 9, 3).double()
    },
    "dt is as low as -0.5, but must be at least 0": {"dt": torch.full((2, 9, 5), -0.5).double()},
    "a is up to 0.25, but must be at most 0": {"a": torch.full((5, 4), 0.25).double()},
    "a is as low as -inf, but must be finite": {"a": torch.full((5, 4), -torch.inf).double()},
    r"state is torch.float32 of shape \[2, 5, 4\], but must be torch.float64": {
        "state": torch.zeros(2, 5, 4)
    },
    "dt is a float, but must be a tensor": {"dt": 0.5, "key_padding_mask": torch.zeros(2, 9).bool()},
    r"key_padding_mask has shape \[2, 8\]": {"key_padding_mask": torch.zeros(2, 8).bool()},
    "key_padding_mask was given with cu_seqlens": {
        "key_padding_mask": torch.zeros(2, 9).bool(),
        "cu_seqlens": torch.tensor([0, 9], dtype=torch.int32),
    },
}


def test_a_step_names_wrong_input():
    x, dt, a, b, c, state = inputs(2, 1, 5, 4)
    with pytest.raises(ValueError, match=r"b is torch.float64 of shape \[2, 1, 4\], but must be .* \[B, N\]"):
        selective_scan_step(x[:, 0], dt[:, 0], a, b, c[:, 0], state)
    with pytest.raises(ValueError, match="state is a NoneType, but must be a tensor"):
        selective_scan_step(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], None)


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message):
    names = ("x", "dt", "a", "b", "c", "state")
    arguments = dict(zip(names, inputs(2, 9, 5, 4), strict=True)) | WRONG[message]
    with pytest.raises(ValueError, match=message):
        selective_scan(**arguments)
