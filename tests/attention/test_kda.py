"""Kimi Delta Attention: the layer around the delta rule with a decay of every channel."""

import pytest
import torch
from agreement import assert_agree
from plain_delta import definition
from torch.nn.functional import silu, softplus

from unrolled.attention.kda import KimiDeltaAttention
from unrolled.contract import UnsupportedError


def test_the_module_is_its_formulas():
    module = KimiDeltaAttention(8, 2, causal=True, n_kv_heads=1, value_dim=3, conv=None).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = module.qkv_proj(x).split([8, 4, 3], dim=-1)
    q, k = (silu(y).unflatten(-1, (-1, 4)) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    decay = softplus(module.decay_up(module.decay_down(x)).unflatten(-1, (1, 4)) + module.decay_bias)
    log_decay, state = -module.log_pace.exp() * decay, torch.zeros(1, 1, 4, 3, dtype=torch.float64)
    o, _ = definition(q / 2, k, v.unflatten(-1, (1, 3)), module.beta_proj(x).sigmoid(), log_decay, state)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    o = o * module.gate_up(module.gate_down(x)).sigmoid().unflatten(-1, (2, 3))
    torch.testing.assert_close(module(x), module.out_proj(o.flatten(2)))


def test_rotary_positions_are_refused():
    with pytest.raises(UnsupportedError, match="features that decay at different rates"):
        KimiDeltaAttention(8, 2, causal=True, rotary=True)


def test_the_rank_of_the_gates_has_a_bound():
    with pytest.raises(ValueError, match="gate_rank is 0, but must be at least 1"):
        KimiDeltaAttention(8, 2, causal=True, gate_rank=0)


@torch.no_grad()
def test_the_layer_of_kimi_linear():
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = kimi.KimiLinearConfig(hidden_size=8, linear_num_heads=3, linear_head_dim=6, pad_token_id=0)
    torch.manual_seed(0)
    theirs = kimi.KimiLinearDeltaAttention(config, layer_idx=0)
    for parameter in theirs.parameters():
        parameter.normal_(0, 0.5)
    theirs = theirs.double().eval()  # but for its recurrence and norm, which are in fp32
    ours = KimiDeltaAttention(8, 3, causal=True, head_dim=6, bias=False, eps=config.rms_norm_eps).double()
    gate = theirs.forget_gate
    for mine, weight in (
        (ours.qkv_proj.weight, torch.cat([x.weight for x in (theirs.q_proj, theirs.k_proj, theirs.v_proj)])),
        (ours.short_conv.weight, theirs.conv1d.weight.squeeze(1)),
        (ours.beta_proj.weight, theirs.b_proj.weight),
        (ours.decay_down.weight, gate.f_a_proj.weight),
        (ours.decay_up.weight, gate.f_b_proj.weight),
        (ours.decay_bias, gate.dt_bias.view(3, 6)),
        (ours.log_pace, gate.A_log.flatten()),
        (ours.gate_down.weight, theirs.g_a_proj.weight),
        (ours.gate_up.weight, theirs.g_b_proj.weight),
        (ours.norm.weight, theirs.o_norm.weight.expand(3, 6)),
        (ours.out_proj.weight, theirs.o_proj.weight),
    ):
        mine.copy_(weight)
    x = torch.randn(2, 70, 8, dtype=torch.float64)
    assert_agree(ours(x), theirs(x), tolerance=1e-5)
