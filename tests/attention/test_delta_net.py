"""DeltaNet: the layer around the delta rule."""

import math

import pytest
import torch
from plain_delta import definition
from torch.nn.functional import silu, softplus

from unrolled.attention.delta_net import DeltaNet
from unrolled.testing import check_mechanism


def test_gated_delta_net_keeps_the_contract():
    check_mechanism("delta_net", gated=True, max_beta=2.0)


@pytest.mark.parametrize("gated", [False, True])
def test_the_module_is_its_formulas(gated):
    module = DeltaNet(8, 2, causal=True, gated=gated, n_kv_heads=1, value_dim=3).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = module.qkv_proj(x).split([8, 4, 3], dim=-1)
    q, k = (silu(y).unflatten(-1, (-1, 4)) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    log_decay = torch.zeros(1, 5, 1, dtype=torch.float64)
    if gated:
        log_decay = -module.log_pace.exp() * softplus(module.decay_proj(x) + module.decay_bias)
    state = torch.zeros(1, 1, 4, 3, dtype=torch.float64)
    o, _ = definition(q, k, v.unflatten(-1, (1, 3)), module.beta_proj(x).sigmoid(), log_decay, state)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if gated:
        o = o * silu(module.gate_proj(x)).unflatten(-1, (2, 3))
    torch.testing.assert_close(module(x), module.out_proj(o.flatten(2)))


def test_decays_begin_between_their_bounds():
    torch.manual_seed(0)
    module = DeltaNet(64, 32, causal=True, gated=True)
    assert ((module.log_pace >= 0) & (module.log_pace <= math.log(16))).all()
    begin = softplus(module.decay_bias)
    assert ((begin >= 0.99e-3) & (begin <= 1.01e-1)).all()


@pytest.mark.parametrize("max_beta", [0, -1, 2.5, math.nan])
def test_max_beta_has_bounds(max_beta):
    with pytest.raises(ValueError, match="max_beta is"):
        DeltaNet(8, 2, causal=True, max_beta=max_beta)


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    module, x = DeltaNet(8, 2, causal=True), torch.randn(2, 6, 8)
    x[0, 3] = torch.nan
    torch.testing.assert_close(module(x)[1:], module(x[1:]))
