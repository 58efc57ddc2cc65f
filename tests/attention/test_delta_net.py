"""DeltaNet: the layer around the delta rule."""

import importlib
import math

import pytest
import torch
from agreement import assert_agree
from contract_parts import in_two_parts
from plain_delta import definition
from torch.nn.functional import silu, softplus

from unrolled.attention.delta_net import DeltaNet
from unrolled.testing import Maker


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"gated": True, "max_beta": 2.0}, {"n_groups": 1}])
@in_two_parts
def test_gates_and_shared_queries_and_keys_keep_the_contract(options, check_part):
    check_part(Maker(DeltaNet, options))


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
    o, _ = definition(q / 2, k, v.unflatten(-1, (1, 3)), module.beta_proj(x).sigmoid(), log_decay, state)
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


def hugging_face(kind, **settings):
    """A layer of transformers, with random weights, in fp64; its recurrence is in fp32."""
    sizes = {
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "hidden_size": 8,
    }
    name = "Qwen3NextGatedDeltaNet" if kind == "qwen3_next" else "OlmoHybridGatedDeltaNet"
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = getattr(module, name.removesuffix("GatedDeltaNet") + "Config")(**sizes | settings)
    torch.manual_seed(0)
    layer = getattr(module, name)(config, layer_idx=0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer.double().eval(), config


@torch.no_grad()
def copied(layer, parts, heads, eps, **options):
    """A layer of ours with the weights of theirs: q, k, v, gate, rate and decay."""
    ours = DeltaNet(
        8,
        4,
        causal=True,
        gated=True,
        conv=4,
        head_dim=6,
        value_dim=5,
        bias=False,
        n_groups=heads,
        eps=eps,
        **options,
    ).double()
    q, k, v, gate, rate, decay = parts
    ours.qkv_proj.weight.copy_(torch.cat([q, k, v]))
    for linear, rows in ((ours.gate_proj, gate), (ours.beta_proj, rate), (ours.decay_proj, decay)):
        linear.weight.copy_(rows)
    ours.decay_bias.copy_(layer.dt_bias)
    ours.log_pace.copy_(layer.A_log)
    ours.short_conv.weight.copy_(layer.conv1d.weight.squeeze(1))
    ours.norm.weight.copy_(getattr(layer, "norm", getattr(layer, "o_norm", None)).weight.expand(4, 5))
    return ours


@pytest.mark.parametrize("groups", [1, 2, 4])
@torch.no_grad()
def test_the_layer_of_qwen3_next(groups):
    pytest.importorskip("transformers")
    layer, config = hugging_face("qwen3_next", linear_num_key_heads=groups)
    shared, rows = 4 // groups, layer.in_proj_qkvz.weight.unflatten(0, (groups, -1))
    parts = [x.flatten(0, 1) for x in rows.split([6, 6, 5 * shared, 5 * shared], 1)]
    parts += [x.flatten(0, 1) for x in layer.in_proj_ba.weight.unflatten(0, (groups, -1)).chunk(2, 1)]
    ours = copied(layer, parts, groups, config.rms_norm_eps)
    ours.out_proj.weight.copy_(layer.out_proj.weight)
    x = torch.randn(2, 70, 8, dtype=torch.float64)
    assert_agree(ours(x), layer(x), tolerance=1e-5)


@torch.no_grad()
def test_the_layer_of_olmo_hybrid():
    pytest.importorskip("transformers")
    layer, _ = hugging_face("olmo_hybrid", linear_num_key_heads=4, linear_allow_neg_eigval=True)
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    ours = copied(layer, [getattr(layer, name).weight for name in names], None, 1e-5, max_beta=2.0)
    ours.out_proj.weight.copy_(layer.o_proj.weight)
    x = torch.randn(2, 70, 8, dtype=torch.float64)
    assert_agree(ours(x), layer(x), tolerance=1e-5)
