"""Linear attention with a gate for every feature: every form must equal the recurrence."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.ops.gla import (
    chunked,
    diagonal_linear_attention,
    diagonal_linear_attention_reference,
    diagonal_linear_attention_step,
)
from unrolled.ops.linear import LinearState, linear_attention


def random_inputs(T=70, S=None, B=2, G=2, P=2, R=5, M=7, seed=0, dtype=torch.float64, rows=None):
    """q, k, v, log_decay and a state, which take gradients."""
    generator = torch.Generator().manual_seed(seed)
    S, rows = T if S is None else S, B if rows is None else rows
    shapes = [(B, T, G * P, R), (B, S, G, R), (B, S, G, M), (B, S, G, R), (rows, G, R, M)]
    q, k, v, gates, state = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    inputs = [x.to(dtype) for x in (q, k, v, -gates.abs())]
    return [x.requires_grad_() for x in (*inputs, state.to(torch.promote_types(dtype, torch.float32)))]


def outputs_and_gradients(form, inputs, **masks):
    q, k, v, log_decay, state = inputs
    o, after = form(q, k, v, log_decay, state=state, return_state=True, **masks)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, after)]
    loss = (o.double() * weights[0]).sum() + (after.double() * weights[1]).sum()
    return [o, after, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)]


def assert_equal(found, expected, tolerance=1e-12):
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        scale = float(y.detach().abs().amax()) if y.numel() else 0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * (1 + scale))


def written_out(q, k, v, log_decay):
    """o_i = sum_j sum_r q_ir k_jr exp(ell_j+1,r + ... + ell_ir) v_j, each weight by itself."""
    o = q.new_zeros(*q.shape[:3], v.shape[3])
    for i in range(q.shape[1]):
        for j in range(i + 1):
            decay = log_decay[:, j + 1 : i + 1].sum(1).exp()
            o[:, i] = o[:, i] + (q[:, i] * k[:, j] * decay).sum(-1, keepdim=True) * v[:, j]
    return o


def test_the_recurrence_is_the_sum_written_out():
    q, k, v, log_decay, _ = random_inputs(T=11, P=1)
    for form in (diagonal_linear_attention, diagonal_linear_attention_reference):
        torch.testing.assert_close(form(q, k, v, log_decay), written_out(q, k, v, log_decay))


@settings(max_examples=40)
@given(
    T=st.integers(0, 140),
    S=st.integers(0, 140),
    B=st.integers(0, 2),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    padded=st.booleans(),
    seed=st.integers(0, 9),
)
def test_equals_the_recurrence(T, S, B, heads, widths, padded, seed):
    inputs = random_inputs(T, S, B, *heads, *widths, seed=seed)
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(seed)) < 0.4 if padded else None
    assert_equal(
        outputs_and_gradients(diagonal_linear_attention, inputs, key_padding_mask=mask),
        outputs_and_gradients(diagonal_linear_attention_reference, inputs, key_padding_mask=mask),
    )


def test_gates_at_padding_may_have_any_value():
    q, k, v, log_decay, state = random_inputs(9, B=2)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, :3] = padding[1, 5:] = True
    found = []
    for value in (0.0, 3.0, torch.nan):
        gates = log_decay.masked_fill(padding[..., None, None], value)
        options = {"key_padding_mask": padding, "state": state, "return_state": True}
        found.append(diagonal_linear_attention(q, k, v, gates, **options))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(0, 90), max_size=6))
def test_packed_sequences_equal_separate_ones(lengths):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = random_inputs(sum(lengths), B=1, rows=len(lengths))

    def separately(q, k, v, log_decay, *, state, return_state):
        outs, states = [q[:, :0, :, :1].expand(-1, -1, -1, v.shape[3])], [state[:0]]
        for n, parts in enumerate(zip(*(x.split(lengths, 1) for x in (q, k, v, log_decay)), strict=True)):
            o, after = diagonal_linear_attention(*parts, state=state[n : n + 1], return_state=return_state)
            outs.append(o)
            states.append(after)
        return torch.cat(outs, 1), torch.cat(states)

    assert_equal(
        outputs_and_gradients(diagonal_linear_attention, inputs, cu_seqlens=cu_seqlens),
        outputs_and_gradients(separately, inputs),
    )


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 100])
def test_split_anywhere_equals_one_run(cut):
    def in_two_runs(q, k, v, log_decay, *, state, return_state):
        outs = []
        for part in (slice(0, cut), slice(cut, None)):
            tokens = (x[:, part] for x in (q, k, v, log_decay))
            o, state = diagonal_linear_attention(*tokens, state=state, return_state=return_state)
            outs.append(o)
        return torch.cat(outs, 1), state

    inputs = random_inputs(100)
    assert_equal(
        outputs_and_gradients(in_two_runs, inputs), outputs_and_gradients(diagonal_linear_attention, inputs)
    )


@pytest.mark.parametrize("longest", [1, 2, 16, 128])
def test_the_length_of_the_chunks_changes_nothing(longest, monkeypatch):
    inputs = random_inputs(150)
    expected = outputs_and_gradients(diagonal_linear_attention, inputs)
    monkeypatch.setattr(chunked, "LONGEST", longest)
    assert_equal(outputs_and_gradients(diagonal_linear_attention, inputs), expected)


@pytest.mark.parametrize("T", [64, 65, 128, 200])
def test_the_length_of_the_spans_changes_nothing(T, monkeypatch):
    inputs = random_inputs(T)
    expected = outputs_and_gradients(diagonal_linear_attention, inputs)
    monkeypatch.setattr(chunked, "CACHED", 1)  # one chunk of 64 at a time
    assert_equal(outputs_and_gradients(diagonal_linear_attention, inputs), expected)


def test_one_gate_for_all_features_is_linear_attention_with_a_gate():
    q, k, v, log_decay, state = random_inputs(150)
    gate = log_decay[..., 0]
    found = diagonal_linear_attention(q, k, v, gate.unsqueeze(-1).expand(k.shape), state=state)
    expected = linear_attention(
        q, k, v, causal=True, log_decay=gate, state=LinearState(state, state.sum(-1)), normalize=False
    )
    torch.testing.assert_close(found, expected)


def test_features_are_sequences_of_their_own():
    q, k, v, log_decay, state = random_inputs(100, P=1)
    found = diagonal_linear_attention(q, k, v, log_decay, state=state)
    one_by_one = 0
    for r in range(q.shape[-1]):
        own, before = slice(r, r + 1), LinearState(state[:, :, r : r + 1], state[:, :, r : r + 1, 0])
        options = {"causal": True, "normalize": False, "log_decay": log_decay[..., r], "state": before}
        one_by_one = one_by_one + linear_attention(q[..., own], k[..., own], v, **options)
    torch.testing.assert_close(found, one_by_one)


def test_the_future_does_not_change_one_bit_of_the_past():
    inputs = random_inputs(133)
    expected = diagonal_linear_attention(*inputs[:4], state=inputs[4])
    for now in (1, 31, 66, 130):
        q, k, v, log_decay = (x.detach().clone() for x in inputs[:4])
        for x in (q, k, v, log_decay):
            x[:, now:] *= 12
        found = diagonal_linear_attention(q, k, v, log_decay, state=inputs[4])
        assert torch.equal(found[:, :now], expected[:, :now])


@pytest.mark.parametrize("cached", [1, 2**17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_the_recurrence_in_the_same_type(dtype, cached, monkeypatch):
    monkeypatch.setattr(chunked, "CACHED", cached)
    inputs = random_inputs(300, R=16, M=16, dtype=dtype)
    exact = outputs_and_gradients(
        diagonal_linear_attention_reference, [x.detach().double().requires_grad_() for x in inputs]
    )
    found = outputs_and_gradients(diagonal_linear_attention, inputs)
    recurrence = outputs_and_gradients(diagonal_linear_attention_reference, inputs)
    for x, y, z in zip(found, recurrence, exact, strict=True):
        rounding = torch.finfo(torch.float32).eps * z.norm()
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm() + rounding


@pytest.mark.parametrize("cached", [1, 2**17])
def test_a_gate_of_zero_forgets_one_feature(cached, monkeypatch):
    monkeypatch.setattr(chunked, "CACHED", cached)
    q, k, v, _, state = random_inputs(100, P=1)
    log_decay = torch.zeros(k.shape, dtype=torch.float64)
    log_decay[:, 70, :, 2] = -torch.inf
    log_decay.requires_grad_()
    o = diagonal_linear_attention(q, k, v, log_decay, state=state)
    forgetful, remembering = q.clone(), q.clone()
    forgetful[..., [0, 1, 3, 4]], remembering[..., 2] = 0, 0
    zeros = torch.zeros_like(log_decay)
    expected = diagonal_linear_attention(remembering, k, v, zeros, state=state)[:, 70:]
    fresh = diagonal_linear_attention(*(x[:, 70:] for x in (forgetful, k, v, zeros)))
    torch.testing.assert_close(o[:, 70:], expected + fresh)
    o.sum().backward()
    assert log_decay.grad.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v, state))


def test_strong_decay_does_not_overflow():
    # Over a chunk these sum to -6400: the factors exp(b_i) and exp(-b_j) of exp(b_i - b_j) would give inf * 0.
    q, k, v = (torch.rand(1, 64, 1, 3).requires_grad_() for _ in range(3))
    o = diagonal_linear_attention(q, k, v, torch.full((1, 64, 1, 3), -100.0))
    o.sum().backward()
    torch.testing.assert_close(o, (q * k).sum(-1, keepdim=True) * v)
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_autocast_does_not_reach_the_sums():
    inputs = random_inputs(100, dtype=torch.float32)
    tokens = [x[:, 0] for x in inputs[:4]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = outputs_and_gradients(diagonal_linear_attention, inputs)
        step, _ = diagonal_linear_attention_step(*tokens, inputs[4])
    for x, y in zip(found, outputs_and_gradients(diagonal_linear_attention, inputs), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(step, diagonal_linear_attention_step(*tokens, inputs[4])[0])


def test_gradients_of_any_order_are_right():
    inputs = random_inputs(5, B=1, G=1, R=2, M=2)

    def form(q, k, v, log_decay, state):
        return diagonal_linear_attention(q, k, v, log_decay, state=state, return_state=True)

    assert torch.autograd.gradcheck(form, inputs)
    assert torch.autograd.gradgradcheck(form, inputs)


# torch.func.jvp itself goes through what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("argument", range(4))
def test_functional_transforms_agree_with_the_recurrence(argument):
    inputs = [x.detach() for x in random_inputs(70, B=1, R=2, M=3)[:4]]
    tangent = torch.rand_like(inputs[argument])

    def of(form):
        def f(x):
            return form(*inputs[:argument], x, *inputs[argument + 1 :]).square().sum()

        return f

    x = inputs[argument]
    for transform in (
        lambda f: torch.func.jvp(f, (x,), (tangent,))[1],
        lambda f: torch.func.grad(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([x, 2 * x])),
    ):
        expected = transform(of(diagonal_linear_attention_reference))
        torch.testing.assert_close(transform(of(diagonal_linear_attention)), expected)


def test_it_is_a_sound_torch_operator():
    inputs = random_inputs(5)
    torch.library.opcheck(torch.ops.unrolled.diagonal_linear_attention.default, (*inputs, None))


def test_compiles_to_one_node():
    inputs = random_inputs(70, B=1)

    def form(q, k, v, log_decay, state):
        return diagonal_linear_attention(q, k, v, log_decay, state=state, return_state=True)

    compiled = torch.compile(form, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(*inputs), form(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": torch.zeros(1, 4, 2)}, "log_decay is torch.float32 of shape [1, 4, 2], but must be floating point [B, S, G, R] = [1, 4, 2, 3]"),
        ({"log_decay": torch.full((1, 4, 2, 3), 0.5)}, "log_decay is up to 0.5, but must be at most 0 (a gate of at most 1)"),
        ({"state": torch.zeros(1, 2, 3, 6)}, "state is torch.float32 of shape [1, 2, 3, 6], but must be torch.float32 [1, 2, 3, 5]"),
        ({"state": torch.zeros(1, 2, 3, 5).half()}, "state is torch.float16 of shape [1, 2, 3, 5], but must be torch.float32 [1, 2, 3, 5]"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(change, message):
    right = {"q": torch.zeros(1, 4, 2, 3), "k": torch.zeros(1, 4, 2, 3), "v": torch.zeros(1, 4, 2, 5)}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        diagonal_linear_attention(**{**right, "log_decay": torch.zeros(1, 4, 2, 3), **change})


@pytest.mark.parametrize(("T", "S"), [(4, 3), (9, 3), (3, 4), (3, 9)])
def test_the_last_query_is_aligned_with_the_last_key(T, S):
    q, k, v, log_decay, state = random_inputs(T, S)
    gates = log_decay[..., :1].expand_as(log_decay)
    before = LinearState(state, torch.zeros_like(state[..., 0]))
    expected = linear_attention(q, k, v, causal=True, log_decay=gates[..., 0], state=before, normalize=False)
    for form in (diagonal_linear_attention, diagonal_linear_attention_reference):
        torch.testing.assert_close(form(q, k, v, gates, state=state), expected)
