"""The replaced functions of transformers: against their definitions in fp64, and as close as transformers'."""

import pytest
import torch
from torch.nn.functional import conv1d, gelu, pad, silu, softplus
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from unrolled.contract import UnsupportedError
from unrolled.interop.hf.accelerate import conv, delta, selective, ssd


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def rule(query, key, value, g, beta, state):
    """The gated delta rules of transformers by their definition, token by token in fp64."""
    query, key, value, g, beta, S = (x.double() for x in (query, key, value, g, beta, state))
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            value.shape[2] // x.shape[2], 2
        )
        for x in (query, key)
    )
    o = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp().reshape(*S.shape[:2], -1, 1)
        read = torch.einsum("bhdm,bhd->bhm", S, k[:, t])
        S = S + torch.einsum("bhd,bhm->bhdm", k[:, t], beta[:, t, :, None] * (value[:, t] - read))
        o.append(torch.einsum("bhdm,bhd->bhm", S, q[:, t]) / q.shape[-1] ** 0.5)
    return torch.stack(o, 1), S


def rule_inputs(T, heads=4, dtype=torch.float32, channels=False):
    q, k, v = (drawn(2, T, *sizes, dtype=dtype) for sizes in ((2, 8), (2, 8), (heads, 16)))
    gates = -drawn(2, T, heads, *[8] * channels).square()
    return q, k, v, gates, drawn(2, T, heads).sigmoid(), drawn(2, heads, 8, 16)


def run_rule(function):
    def run(q, k, v, g, beta, state):
        return function(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    return run


def scan(x, dt, A, B, C, D, bias, state):
    """The scan of Mamba-2 by its definition, token by token in fp64."""
    x, dt, A, B, C, D, bias, S = (y.double() for y in (x, dt, A, B, C, D, bias, state))
    dt = softplus(dt + bias)
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    o = []
    for t in range(x.shape[1]):
        S = S * (dt[:, t] * A).exp()[..., None, None]
        S = S + torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], B[:, t])
        o.append(torch.einsum("bhpn,bhn->bhp", S, C[:, t]) + D[:, None] * x[:, t])
    return torch.stack(o, 1), S


def scan_inputs(T, groups):
    x, dt, B, C = (drawn(2, T, *sizes) for sizes in ((4, 8), (4,), (groups, 16), (groups, 16)))
    return x, dt, -drawn(4).exp(), B, C, drawn(4), drawn(4), drawn(2, 4, 8, 16)


def run_scan(function):
    def run(x, dt, A, B, C, D, bias, state):
        return function(
            x,
            dt,
            A,
            B,
            C,
            chunk_size=16,
            D=D,
            dt_bias=bias,
            initial_states=state,
            dt_softplus=True,
            return_final_states=True,
        )

    return run


def outputs_and_gradients(run, inputs):
    """The outputs for these inputs, and the gradients of a fixed function of them."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = run(*inputs)
    loss = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def check(ours, theirs, definition, inputs):
    """Require errors of at most twice those of transformers, in outputs and gradients."""
    exact = outputs_and_gradients(definition, [x.double() for x in inputs])
    for found, reference, true in zip(
        outputs_and_gradients(ours, inputs), outputs_and_gradients(theirs, inputs), exact, strict=True
    ):
        assert found.shape == reference.shape
        assert found.dtype == reference.dtype
        error, allowed = ((x - true).abs().max() for x in (found, reference))
        assert error <= 2 * allowed + 1e-6 * true.abs().max()


FP32_AND_FP64 = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@FP32_AND_FP64
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("kind", ["as many heads", "grouped", "gates of channels"])
def test_the_delta_rule(T, kind, dtype):
    ours, theirs, channels = delta.chunk_delta_rule, qwen.torch_chunk_gated_delta_rule, False
    if kind == "gates of channels":
        theirs, channels = kimi.chunk_kimi_delta_attention, True
    inputs = [x.to(dtype) for x in rule_inputs(T, 4 if kind == "grouped" else 2, channels=channels)]
    check(run_rule(ours), run_rule(theirs), rule, inputs)
    exact = rule(*inputs)
    for rows in (slice(2), slice(1)):  # without gradients, another kernel runs, which copies less for one row
        found, expected = (run_rule(f)(*(x[rows] for x in inputs)) for f in (ours, theirs))
        for mine, reference, true in zip(found, expected, exact, strict=True):
            error, allowed = ((x - true[rows]).abs().max() for x in (mine, reference))
            assert error <= 2 * allowed + 1e-6 * true.abs().max()


@FP32_AND_FP64
@pytest.mark.parametrize("channels", [False, True])
def test_a_step_of_the_delta_rule(channels, dtype):
    inputs = [x.to(dtype) for x in rule_inputs(1, 2, channels=channels)]
    exact = rule(*inputs)
    for grad in (True, False):  # without gradients, the kernel for a single token runs
        with torch.set_grad_enabled(grad):
            found = run_rule(delta.recurrent_delta_rule)(*inputs)
        expected = exact[0].to(dtype), exact[1].float()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_keys_that_are_not_normalised_are_scaled_and_repeated_only():
    q, k, v, g, beta, _ = rule_inputs(20)
    expected = qwen.torch_chunk_gated_delta_rule(q, k / 9, v, g=g, beta=beta)[0]
    found, state = delta.chunk_delta_rule(q, k / 9, v, g=g, beta=beta)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert state is None
    found, state = delta.recurrent_delta_rule(q, k / 9, v, g, beta)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert state is None


def test_a_step_returns_its_state_only_if_asked_for_it():
    *inputs, state = rule_inputs(1)
    found, none = delta.recurrent_delta_rule(*inputs, initial_state=state)
    torch.testing.assert_close(found, delta.chunk_delta_rule(*inputs, initial_state=state)[0])
    assert none is None


def test_keys_of_another_type_than_queries_are_accepted():
    """As in autocast, where a norm computes in fp32."""
    q, k, v, *others = rule_inputs(20)
    k, v = k.bfloat16(), v.bfloat16()
    found = run_rule(delta.chunk_delta_rule)(q, k, v, *others)
    torch.testing.assert_close(found, run_rule(delta.chunk_delta_rule)(q, k.float(), v.float(), *others))


@FP32_AND_FP64
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_scan_of_mamba_2(T, groups, dtype):
    inputs = [x.to(dtype) for x in scan_inputs(T, groups)]
    inputs[5] = inputs[5].float()  # D
    check(run_scan(ssd.mamba2_chunk_scan), run_scan(mamba2.mamba2_chunk_scan), scan, inputs)


def test_the_scan_limits_step_sizes():
    x, dt, A, B, C, *_ = scan_inputs(20, 2)
    limited = {"chunk_size": 16, "dt_softplus": True, "dt_limit": (0.5, 0.9)}
    expected = mamba2.mamba2_chunk_scan(x, dt, A, B, C, **limited)
    torch.testing.assert_close(
        ssd.mamba2_chunk_scan(x, dt, A, B, C, **limited), expected, atol=1e-5, rtol=1e-5
    )


def test_the_scan_reads_a_state_that_is_overwritten_before_the_backward_pass():
    *inputs, state = scan_inputs(20, 2)
    slopes = []
    for overwrite in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        kept = state.clone()
        loss = sum(y.square().sum() for y in run_scan(ssd.mamba2_chunk_scan)(*leaves, kept))
        if overwrite:
            kept.zero_()
        slopes.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("own_layout", [True, False], ids=["state of our scan", "state of transformers"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_step_of_mamba_2_updates_the_state(gated, own_layout):
    x, dt, A, B, C, D, bias, state = scan_inputs(1, 2)
    o, after = scan(x, dt, A, B, C, D, bias, state)
    z = drawn(2, 4, 8) if gated else None
    expected = o[:, 0] if z is None else o[:, 0] * silu(z)
    kept = state.mT.contiguous().mT if own_layout else state
    found = ssd.mamba2_selective_state_update(
        kept,
        x[:, 0],
        dt[:, 0, :, None].expand(-1, -1, 8),
        A[:, None, None].expand(-1, 8, 16),
        B[:, 0],
        C[:, 0],
        D[:, None].expand(-1, 8),
        z=z,
        dt_bias=bias[:, None].expand(-1, 8),
        dt_softplus=True,
    )
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept, after.float(), atol=1e-5, rtol=1e-5)


def test_a_step_of_mamba_2_has_the_type_of_its_inputs():
    x, dt, A, B, C, *_, state = scan_inputs(1, 2)
    x, dt, B, C = (y[:, 0].bfloat16() for y in (x, dt, B, C))
    wide = dt[..., None].expand(-1, -1, 8), A[:, None, None].expand(-1, 8, 16)
    for z in (None, drawn(2, 4, 8, dtype=torch.bfloat16)):
        found = ssd.mamba2_selective_state_update(state, x, *wide, B, C, z=z)
        assert (found.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def selective_scan(x, dt, A, B, C, D, z, bias):
    """The scan of the first Mamba by its definition, token by token in fp64."""
    x, dt, A, B, C, D, z, bias = (y.double() for y in (x, dt, A, B, C, D, z, bias))
    dt, h, o = softplus(dt + bias[:, None]), 0, []
    for t in range(x.shape[2]):
        h = (dt[..., t, None] * A).exp() * h + (dt * x)[..., t, None] * B[:, None, :, t]
        o.append(torch.einsum("bcn,bn->bc", h, C[..., t]) + D * x[..., t])
    return torch.stack(o, 2) * silu(z), h


def selective_inputs(T):
    x, dt, B, C, z = (drawn(2, width, T) for width in (6, 6, 5, 5, 6))
    return x, dt, -drawn(6, 5).exp(), B, C, drawn(6), z, drawn(6)


def run_selective(function):
    def run(x, dt, A, B, C, D, z, bias):
        return function(
            x, dt, A, B, C, D=D, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True
        )

    return run


@FP32_AND_FP64
@pytest.mark.parametrize("T", [1, 70])
def test_the_selective_scan(T, dtype):
    inputs = [x.to(dtype) for x in selective_inputs(T)]
    ours, theirs = map(run_selective, (selective.mamba_selective_scan, mamba.mamba_selective_scan))
    check(ours, theirs, selective_scan, inputs)
    inputs[1] = inputs[1].abs()  # step sizes without softplus
    y = selective.mamba_selective_scan(*inputs[:5])
    torch.testing.assert_close(y, mamba.mamba_selective_scan(*inputs[:5]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_selective_scan_of_narrow_types(dtype):
    x, dt, A, B, C, D, z, bias = selective_inputs(70)
    inputs = [*(y.to(dtype) for y in (x, dt)), A, *(y.to(dtype) for y in (B, C)), D, z.to(dtype), bias]
    exact = selective_scan(*inputs)
    found, expected = (
        run_selective(f)(*inputs) for f in (selective.mamba_selective_scan, mamba.mamba_selective_scan)
    )
    for ours, theirs, true in zip(found, expected, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [True, False])
def test_a_step_of_the_selective_scan_updates_the_state(full, dtype):
    x, dt, A, B, C, D, z, bias = selective_inputs(1)
    x, dt, B, C, z = (y[..., 0].to(dtype) for y in (x, dt, B, C, z))
    options = {"D": D, "z": z, "dt_bias": bias, "dt_softplus": True} if full else {}
    given, state = (x, dt.abs(), A, B, C), drawn(2, 6, 5)
    ours, theirs, exact = state.clone(), state.clone(), state.double()
    found = selective.mamba_selective_state_update(ours, *given, **options)
    expected = mamba.mamba_selective_state_update(theirs, *given, **options)
    wide = {name: y.double() if torch.is_tensor(y) else y for name, y in options.items()}
    true = mamba.mamba_selective_state_update(exact, *(y.double() for y in given), **wide)
    for mine, reference, y in ((found, expected, true), (ours, theirs, exact)):
        assert mine.dtype == reference.dtype
        assert (mine - y).abs().max() <= 2 * (reference - y).abs().max() + 1e-6


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_the_convolution(T, activation):
    def definition(x, weight, bias):
        y = conv1d(pad(x, (3, 0)), weight.unsqueeze(1), bias, groups=5)
        return [{None: lambda y: y, "silu": silu, "gelu": gelu}[activation](y)]

    def run(x, weight, bias):
        return [conv.causal_conv1d_fn(x, weight, bias, activation)]

    def theirs(x, weight, bias):
        return [qwen.causal_conv1d_fn(x, weight, bias, activation)]

    check(run, theirs, definition, [drawn(2, T, 5).mT, drawn(5, 4), drawn(5)])


@pytest.mark.parametrize("T", [1, 3])
def test_the_convolution_continues_from_a_state(T):
    x, weight, bias = drawn(2, 5, 9 + T), drawn(5, 4), drawn(5)
    state, theirs = x[..., 5:9].clone(), x[..., 5:9].clone()
    found = conv.causal_conv1d_update(x[..., 9:], state, weight, bias, "silu")
    expected = qwen.causal_conv1d_update(x[..., 9:], theirs, weight, bias, "silu")
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(state, theirs)
    assert torch.equal(state, x[..., -4:])


@pytest.mark.parametrize("function", ["rule", "scan", "selective scan", "convolution"])
def test_packed_sequences_are_refused(function):
    calls = {
        "rule": lambda: delta.chunk_delta_rule(*rule_inputs(4)[:5], cu_seqlens=torch.tensor([0, 4])),
        "scan": lambda: ssd.mamba2_chunk_scan(*scan_inputs(4, 1)[:5], 16, seq_idx=torch.zeros(2, 4)),
        "selective scan": lambda: selective.mamba_selective_scan(
            *selective_inputs(4)[:5], seq_idx=torch.zeros(2, 4)
        ),
        "convolution": lambda: conv.causal_conv1d_fn(drawn(2, 5, 4), drawn(5, 4), seq_idx=torch.zeros(2, 4)),
    }
    with pytest.raises(UnsupportedError, match="cannot keep packed sequences apart"):
        calls[function]()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_as_close_as_those_of_transformers(dtype):
    q, k, v, g, beta, _ = rule_inputs(70, dtype=dtype)
    exact, _ = rule(q, k, v, g, beta.to(dtype), torch.zeros(2, 4, 8, 16))
    for ours, theirs in (
        (delta.chunk_delta_rule, qwen.torch_chunk_gated_delta_rule),
        (delta.recurrent_delta_rule, qwen.torch_recurrent_gated_delta_rule),
    ):
        (found, _), (expected, _) = (
            f(q, k, v, g=g, beta=beta.to(dtype), use_qk_l2norm_in_kernel=True) for f in (ours, theirs)
        )
        assert found.dtype == dtype
        assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()


def test_one_token_without_a_state_begins_a_sequence():
    *inputs, state = rule_inputs(1)
    found = run_rule(delta.recurrent_delta_rule)(*inputs, None)
    expected = rule(*inputs, torch.zeros_like(state))
    torch.testing.assert_close(found, tuple(x.float() for x in expected), atol=1e-6, rtol=1e-5)
