"""What is specific to gated linear attention: a gate for every feature, read from the input."""

import math

import pytest
import torch
from agreement import assert_same
from contract_parts import in_two_parts
from torch import nn

from unrolled import attention
from unrolled.attention.gated_linear import GatedLinearAttention
from unrolled.attention.retention import Retention
from unrolled.testing import Maker


@pytest.mark.slow
@in_two_parts
def test_other_options_keep_the_contract(check_part):
    check_part(Maker(GatedLinearAttention, {"gate_rank": 2, "temperature": 1.0, "bias": False}))


def layer(temperature=16.0):
    """A layer, its input, and its queries, keys and values by head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = GatedLinearAttention(8, 2, causal=True, temperature=temperature).double()
        x = torch.randn(2, 70, 8, dtype=torch.float64)
    return module, x, [y.unflatten(-1, (2, 4)) for y in module.qkv_proj(x).split(8, dim=-1)]


def test_the_layer_is_the_equations_of_the_paper():
    module, x, (q, k, v) = layer(temperature=4.0)
    alpha = module.decay_up(x @ module.decay_down.weight.T).sigmoid().pow(1 / 4.0).unflatten(-1, (2, 4))
    S, outs = torch.zeros(2, 2, 4, 4, dtype=torch.float64), []
    for t in range(70):
        S = alpha[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append((q[:, t, :, None] @ S).squeeze(2) / 4**0.5)
    o = torch.stack(outs, 1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.head_norm.weight
    gate = module.gate_proj(x)
    expected = module.out_proj(gate * gate.sigmoid() * o.flatten(-2))
    assert_same(module(x), expected, list(module.parameters()))


def test_memory_is_long_at_the_beginning():
    module, x, _ = layer()
    assert module.read_input(x).log_alpha.exp().mean() > 0.95  # sigmoid(0)^(1/16) is 0.958


def test_gates_far_from_0_keep_their_digits():
    module, x, _ = layer()
    module.decay_up.weight.data.zero_()
    for bias, log_sigmoid in ((-1000.0, -1000.0), (30.0, -math.exp(-30.0))):
        module.decay_up.bias.data.fill_(bias)
        assert module.read_input(x).log_alpha[0, 0, 0, 0].item() == pytest.approx(log_sigmoid / 16, rel=1e-12)


def test_equal_constant_gates_give_retention():
    module, x, _ = layer()
    retention = Retention(8, 2, causal=True, rotary=False).double()
    retention.load_state_dict(module.state_dict(), strict=False)
    gamma = 1 - 2.0 ** (-5 - torch.arange(2, dtype=torch.float64))
    odds = gamma**16 / (1 - gamma**16)
    module.decay_up.weight.data.zero_()
    module.decay_up.bias.data.copy_(odds.log().repeat_interleave(4))
    torch.testing.assert_close(module(x), retention(x))


def test_wrong_options_are_refused():

    with pytest.raises(ValueError, match="gate_rank is 0, but must be at least 1"):
        GatedLinearAttention(8, 2, causal=True, gate_rank=0)
    with pytest.raises(ValueError, match="temperature is 0"):
        GatedLinearAttention(8, 2, causal=True, temperature=0)


def test_gates_of_gla_start_close_to_1_by_default():
    layer = attention.load("gated_linear")(8, 2, causal=True)
    nn.init.zeros_(layer.decay_up.bias)
    (log_alpha,) = layer.read_input(torch.zeros(1, 8))
    torch.testing.assert_close(log_alpha.exp(), torch.full((1, 2, 4), 0.5 ** (1 / 16)))
