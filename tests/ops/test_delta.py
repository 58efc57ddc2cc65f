"""What makes the delta rule itself: it erases before it writes, so that it retrieves exactly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_delta import definition
from torch.nn.functional import normalize

from unrolled.ops.delta import delta_rule, delta_rule_reference, delta_rule_step
from unrolled.ops.linear import linear_attention


def rule_inputs(B=2, T=9, G=2, P=1, D=4, M=3, seed=0, channels=False):
    """Queries and unit keys, values, rates in (0, 2), log gates and a state, all with gradients.

    The gates differ between heads, or with `channels` also between the channels of a key.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, k, v = normal(B, T, G * P, D), normalize(normal(B, T, G, D), dim=-1), normal(B, T, G, M)
    beta, gates = 2 * normal(B, T, G).sigmoid(), normal(B, T, G, D) if channels else normal(B, T, G)
    return [x.requires_grad_() for x in (q, k, v, beta, -gates.square(), normal(B, G, D, M))]


def with_gradients(outputs, inputs):
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)]


@settings(max_examples=25)
@given(
    st.integers(1, 2),
    st.sampled_from([0, 1, 2, 5, 63, 64, 65, 130]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_form_is_the_definition(B, T, G, P, channels):
    q, k, v, beta, log_decay, state = x = rule_inputs(B, T, G, P, channels=channels)
    expected = with_gradients(definition(*x), x)
    for form in (delta_rule, delta_rule_reference):
        found = with_gradients(form(q, k, v, beta, log_decay=log_decay, state=state), x)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [False, True])
def test_wide_heads_have_longer_chunks_and_the_same_definition(channels):
    q, k, v, beta, log_decay, state = x = rule_inputs(1, 130, 1, D=66, channels=channels)
    found = delta_rule(q, k, v, beta, log_decay=log_decay, state=state)
    torch.testing.assert_close(found, definition(*x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_padding_and_packing_change_nothing(seed, channels):
    q, k, v, beta, log_decay, _ = rule_inputs(B=1, T=80, seed=seed, channels=channels)
    state = torch.randn(3, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 70, 70, 80], dtype=torch.int32)
    inputs = [q, k, v, beta, log_decay, state]
    options = {"log_decay": log_decay, "state": state, "cu_seqlens": cu_seqlens}
    found = with_gradients(delta_rule(q, k, v, beta, **options), inputs)
    expected = with_gradients(delta_rule_reference(q, k, v, beta, **options), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    padding = torch.rand(1, 80, generator=torch.Generator().manual_seed(seed)) < 0.3
    spoiled = [x.masked_fill(padding.view(1, 80, *[1] * (x.dim() - 2)), math.inf) for x in inputs[:4]]
    spoiled_decay = log_decay.masked_fill(padding.view(1, 80, *[1] * (log_decay.dim() - 2)), math.nan)
    o, S = delta_rule(*spoiled, log_decay=spoiled_decay, key_padding_mask=padding, state=state[:1])
    kept = [x[:, ~padding[0]] for x in inputs[:5]]
    o_alone, S_alone = delta_rule(*kept[:4], log_decay=kept[4], state=state[:1])
    torch.testing.assert_close(o[:, ~padding[0]], o_alone)
    torch.testing.assert_close(S, S_alone)


def test_orthonormal_keys_are_retrieved_exactly():
    keys, v = torch.eye(8, dtype=torch.float64).view(1, 8, 1, 8), rule_inputs(1, 8, 1)[2]
    _, S = delta_rule(keys, keys, v, torch.ones(1, 8, 1))
    o, _ = delta_rule(keys, keys, torch.zeros_like(v), torch.zeros(1, 8, 1), state=S)
    assert torch.equal(o, v)


def test_a_key_holds_its_last_value_only():
    generator = torch.Generator().manual_seed(0)
    key = normalize(torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=generator), dim=-1)
    v = torch.randn(1, 100, 1, 3, dtype=torch.float64, generator=generator)
    keys = key.expand(1, 100, 1, 8)
    o, _ = delta_rule(keys, keys, v, torch.ones(1, 100, 1))
    torch.testing.assert_close(o, v)  # where linear attention gives the sum of all values so far
    added = linear_attention(keys, keys, v, causal=True, normalize=False)
    torch.testing.assert_close(added, v.cumsum(1))


def test_orthonormal_keys_with_a_rate_of_one_add_up_like_linear_attention():
    q, _, v, *_ = rule_inputs(T=4, D=4)
    k = torch.eye(4, dtype=torch.float64).view(1, 4, 1, 4).expand(2, 4, 2, 4)
    o, _ = delta_rule(q, k, v, torch.ones(2, 4, 2))
    torch.testing.assert_close(o, linear_attention(q, k, v, causal=True, normalize=False))


@pytest.mark.parametrize("channels", [False, True])
def test_without_writing_the_state_only_decays(channels):
    q, k, v, beta, log_decay, state = rule_inputs(T=70, channels=channels)
    _, S = delta_rule(q, k, v, torch.zeros_like(beta), log_decay=log_decay, state=state)
    kept = log_decay.sum(1).exp().view(2, 2, -1, 1)
    torch.testing.assert_close(S, state * kept, rtol=1e-12, atol=0)


def test_equal_gates_of_all_channels_are_one_gate():
    q, k, v, beta, log_decay, state = x = rule_inputs(T=70)
    by_feature = log_decay.unsqueeze(-1).expand_as(k)
    one, every = (
        with_gradients(delta_rule(q, k, v, beta, log_decay=gates, state=state), x)
        for gates in (log_decay, by_feature)
    )
    torch.testing.assert_close(every, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strong_decays_and_gates_of_zero_do_not_overflow(dtype):
    """The reciprocal of such a product of gates is beyond the range of fp64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, beta, log_decay, state = rule_inputs(T=70, channels=True)
    gates = 300 * log_decay.detach()
    gates[torch.rand(gates.shape, generator=generator) < 0.1] = -math.inf
    x = [y.detach().to(dtype).requires_grad_() for y in (q, k, v, beta, gates, state)]
    q, k, v, beta, gates, state = x
    found = with_gradients(delta_rule(q, k, v, beta, log_decay=gates, state=state), x)
    expected = with_gradients(definition(*x), x)
    torch.testing.assert_close(
        found, expected, **({} if dtype is torch.float32 else {"rtol": 1e-10, "atol": 1e-10})
    )


def test_no_decay_is_the_plain_rule_and_a_gate_of_zero_forgets():
    q, k, v, beta, _, state = rule_inputs(T=70)
    ungated = delta_rule(q, k, v, beta, log_decay=torch.zeros_like(beta), state=state)
    torch.testing.assert_close(ungated, delta_rule(q, k, v, beta, state=state))
    gates = torch.zeros_like(beta).index_fill(1, torch.tensor(30), -math.inf)
    o, S = delta_rule(q, k, v, beta, log_decay=gates, state=state)
    fresh, S_fresh = delta_rule(*(x[:, 30:] for x in (q, k, v, beta)))
    torch.testing.assert_close(o[:, 30:], fresh)
    torch.testing.assert_close(S, S_fresh)


def test_a_rate_of_two_reflects():
    """I - 2 k k^T changes the sign of what k holds: an eigenvalue of -1, so that a state can count parity."""
    key = torch.eye(4, dtype=torch.float64)[:1].view(1, 1, 1, 4).expand(1, 3, 1, 4)
    state = torch.ones(1, 1, 4, 2, dtype=torch.float64)
    o, _ = delta_rule(key, key, torch.zeros(1, 3, 1, 2).double(), torch.full((1, 3, 1), 2.0), state=state)
    assert o[0, :, 0, 0].tolist() == [-1, 1, -1]


@pytest.mark.parametrize("decay", [None, 0.0, 0.01])
@pytest.mark.parametrize("rate", [1.0, 2.0])
@pytest.mark.parametrize("same", [True, False])
def test_chunks_are_as_precise_as_steps(rate, same, decay):
    """With one key throughout and a rate of 2, the system of a chunk is as far from I as it can be."""
    q, k, v, _, log_decay, _ = (x.detach().float() for x in rule_inputs(1, 1000, 1, D=16, channels=True))
    k = normalize(k[:, :1].expand_as(k) if same else k, dim=-1)
    beta = torch.full((1, 1000, 1), rate)
    log_decay = None if decay is None else decay * log_decay
    wide = None if log_decay is None else log_decay.double()
    exact, _ = delta_rule_reference(*(x.double() for x in (q, k, v, beta)), log_decay=wide)
    chunked, steps = (
        (form(q, k, v, beta, log_decay=log_decay)[0] - exact).square().mean()
        for form in (delta_rule, delta_rule_reference)
    )
    assert chunked <= 4 * steps  # twice the root mean square


def changed(**arguments):
    q, k, v, beta, log_decay, state = (x.detach() for x in rule_inputs())
    return {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "state": state} | arguments


WRONG = {
    "k has a key of length 3, but its keys must have length at most 1: normalise": {
        "k": torch.full((2, 9, 2, 4), 1.5)
    },
    r"beta is from 2.5 to 2.5, but must be in \[0, 2\]": {"beta": torch.full((2, 9, 2), 2.5)},
    "log_decay is up to 0.5, but must be at most 0": {"log_decay": torch.full((2, 9, 2), 0.5)},
    r"beta is torch.float32 of shape \[2, 9\]": {"beta": torch.ones(2, 9)},
    r"log_decay is torch.float32 of shape \[2, 9, 2, 3\], but must be floating point \[B, T, G, D\]": {
        "log_decay": torch.zeros(2, 9, 2, 3)
    },
    r"log_decay is torch.int64 of shape \[2, 9, 2\]": {"log_decay": torch.zeros(2, 9, 2).long()},
    r"state is torch.float64 of shape \[1, 2, 4, 3\], but must be torch.float64 \[2, 2, 4, 3\]": {
        "state": torch.zeros(1, 2, 4, 3).double()
    },
    "state is torch.float32": {"state": torch.zeros(2, 2, 4, 3)},
    r"k has shape \[2, 8, 2, 4\], but must be \[2, 9, G, 4\] like q": {
        "k": torch.zeros(2, 8, 2, 4),
        "v": torch.zeros(2, 8, 2, 3),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message):
    with pytest.raises(ValueError, match=message):
        delta_rule(**changed(**WRONG[message]))


def test_a_step_requires_unit_keys_too():
    q, k, v, beta, _, state = (x.detach() for x in rule_inputs())
    with pytest.raises(ValueError, match="k has a key of length 2"):
        delta_rule_step(q[:, 0], 2 * k[:, 0], v[:, 0], beta[:, 0], state)


def test_negative_rates_are_refused():
    q, k, v, *_ = rule_inputs()
    with pytest.raises(ValueError, match=r"beta is from -0.5 to -0.5, but must be in \[0, 2\]"):
        delta_rule(q, k, v, torch.full((2, 9, 2), -0.5))


def test_nan_in_padded_queries_reaches_no_gradient():
    q, k, v, beta, *_ = rule_inputs()
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 5:] = True
    q = q.detach().masked_fill(padding[..., None, None], torch.nan).requires_grad_()
    o, _ = delta_rule(q, k, v, beta, key_padding_mask=padding)
    found = torch.autograd.grad(o[~padding].sum(), [q, k, v, beta])
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("name", ["beta", "log_decay"])
def test_what_is_no_tensor_is_named(name):
    q, k, v, beta, *_ = rule_inputs()
    given = {"beta": beta, name: [0.5], "key_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}
    with pytest.raises(ValueError, match=f"{name} is a list, but must be a tensor"):
        delta_rule(q, k, v, **given)
