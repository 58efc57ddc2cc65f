"""What is specific to retention: its rates, its rotation, and what it comes from."""

import pytest
import torch
from agreement import assert_same
from contract_parts import in_two_parts

from unrolled.attention.retention import Retention, log_gamma, retention, retention_reference, retention_step
from unrolled.ops.linear import linear_attention
from unrolled.ops.positions import rotary
from unrolled.testing import Maker


def heads(T=70, H=4, G=2, D=6, M=5):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, T, H, D), (2, T, G, D), (2, T, G, M)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.slow
@in_two_parts
def test_other_options_keep_the_contract(check_part):
    check_part(Maker(Retention, {"rotary": False, "value_dim": 8, "bias": False}))


def test_rates_are_those_of_the_paper():
    expected = torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], dtype=torch.float64)
    torch.testing.assert_close(log_gamma(3).exp(), expected, rtol=1e-15, atol=0)
    # Slow heads keep their digits: log(1 - x) is -x when x is small.
    torch.testing.assert_close(log_gamma(41)[40], -(torch.tensor(2.0, dtype=torch.float64) ** -45))


def test_equals_the_parallel_form_of_the_paper():
    q, k, v = heads()
    found, _ = retention(q, k, v, log_gamma(2))
    expected = retention_reference(q, k, v, log_gamma(2))
    assert_same(found, expected, [q, k, v])


def test_steps_are_the_recurrence_of_the_paper():
    q, k, v = (x.detach() for x in heads(T=9, H=2))
    positions = torch.arange(9).expand(2, 9)
    parallel, after = retention(q, k, v, log_gamma(2), positions)
    turned_q, turned_k = rotary(q, positions), rotary(k, positions)
    state = S = torch.zeros(2, 2, 6, 5, dtype=torch.float64)
    for t in range(9):
        S = log_gamma(2).exp()[:, None, None] * S + turned_k[:, t, :, :, None] * v[:, t, :, None]
        written_out = (turned_q[:, t, :, None] @ S).squeeze(2) / 6**0.5
        o, state = retention_step(q[:, t], k[:, t], v[:, t], log_gamma(2), state, positions[:, t])
        torch.testing.assert_close(o, written_out)
        torch.testing.assert_close(parallel[:, t], written_out)
    torch.testing.assert_close(state, S)
    torch.testing.assert_close(after, S)


def test_without_decay_and_rotation_it_is_unnormalised_linear_attention():
    q, k, v = heads()
    found, _ = retention(q, k, v, torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(found, linear_attention(q, k, v, causal=True, normalize=False) / 6**0.5)


def test_the_layer_normalises_and_gates_each_head():
    module = Retention(8, 2, causal=True, rotary=False, value_dim=6).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    q, k, v = (y.unflatten(-1, (2, -1)) for y in module.qkv_proj(x).split([8, 8, 12], dim=-1))
    o = retention_reference(q, k, v, log_gamma(2))
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.head_norm.weight
    gate = module.gate_proj(x)
    expected = module.out_proj(gate * gate.sigmoid() * o.flatten(-2))
    torch.testing.assert_close(module(x), expected)


def paper(module, x, eps):
    """Eq. 5 and 8 with the normalisations of section 2.2 and the angles of the authors' code, in a loop over heads."""
    (_, T, d), H = x.shape, module.n_heads
    w_q, w_k, w_v = module.qkv_proj.weight.split(d)
    i, D = torch.arange(T, dtype=x.dtype), d // H
    angle = i[:, None] * 10000 ** -torch.linspace(0, 1, D // 2, dtype=x.dtype)
    outs = []
    for h in range(H):
        q, k, v = (x @ w[h * D : (h + 1) * D].T for w in (w_q, w_k, w_v))
        q, k = (torch.view_as_complex(y.unflatten(-1, (D // 2, 2)).contiguous()) for y in (q, k))
        turned_q, turned_k = (y * torch.polar(torch.ones_like(angle), angle) for y in (q, k))
        decay = ((1 - 2.0 ** (-5 - h)) ** (i[:, None] - i)).tril()
        decay = decay / decay.sum(-1, keepdim=True).sqrt()
        scores = (turned_q @ turned_k.mH).real / D**0.5 * decay
        scores = scores / scores.abs().sum(-1, keepdim=True).clamp(min=1)
        o = scores @ v
        outs.append(o / (o.square().mean(-1, keepdim=True) + eps).sqrt())
    gate = module.gate_proj(x)
    return module.out_proj(gate * gate.sigmoid() * torch.cat(outs, -1))


@pytest.mark.parametrize("eps", [1e-6, 1e-12])
def test_it_reads_weights_of_torchscale(eps):
    """But for eps, which meets rows that are scaled there and not here."""
    torch.manual_seed(0)  # some weights give rows so small that eps shows
    options = {"causal": True, "bias": False, "eps": eps}
    module = Retention(16, 2, angles="closed", **options).double()
    x = torch.randn(2, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = paper(module, x, eps)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e3 * eps)
    y, state = module.prefill(x[:, :7], module.init_state(2))
    for t in range(7, 20):
        y, state = module.step(x[:, t], state)
    torch.testing.assert_close(y, expected[:, -1], rtol=0, atol=1e3 * eps)
    other = Retention(16, 2, **options).double()
    other.load_state_dict(module.state_dict())
    assert (other(x) - expected).abs().max() > 1e-2


def test_sums_that_fp16_has_no_room_for():
    q, k, v = (torch.full((1, 2000, 1, 4), 10.0, dtype=torch.float16) for _ in range(3))
    o, _ = retention(q, k, v, torch.zeros(1))
    assert o.dtype == torch.float32
    assert o[0, -1, 0, 0] == 2000 * 4 * 10**3 / 2  # 4 million; fp16 ends at 65504


def test_wrong_arguments_are_refused():

    with pytest.raises(ValueError, match="angles is 'xpos', but must be 'rotary' or 'closed'"):
        Retention(8, 2, causal=True, angles="xpos")
    with pytest.raises(ValueError, match="eps is 0, but must be above 0"):
        Retention(8, 2, causal=True, eps=0)
    q, k, v = heads()
    with pytest.raises(ValueError, match=r"log_decay has shape \[4\], but must be \[G\] = \[2\]"):
        retention(q, k, v, log_gamma(4))
