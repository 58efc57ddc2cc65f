"""Mamba-2: the layer around linear attention with a decay."""

import math

import pytest
import torch
from agreement import assert_agree
from contract_parts import in_two_parts
from torch.nn.functional import silu, softplus

from unrolled.attention.mamba2 import Mamba2
from unrolled.interop.hf.mamba2 import copy_mixer
from unrolled.testing import Maker

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
@in_two_parts
def test_groups_and_no_convolution_keep_the_contract(check_part):
    check_part(Maker(Mamba2, {"n_groups": 2, "conv": None}))


def test_the_module_is_its_formulas():
    module = Mamba2(8, 4, causal=True, n_groups=2, head_dim=3, value_dim=5, conv=2).double()
    for parameter in (module.short_conv.weight, module.short_conv.bias, module.skip, module.norm.weight):
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    qkv = module.qkv_proj(x)
    before = torch.cat([torch.zeros_like(qkv[:, :1]), qkv[:, :-1]], 1)
    taps = module.short_conv.weight
    q, k, v = silu(before * taps[:, 0] + qkv * taps[:, 1] + module.short_conv.bias).split([6, 6, 20], -1)
    q, k, v = q.unflatten(-1, (2, 3)), k.unflatten(-1, (2, 3)), v.unflatten(-1, (4, 5))
    size = softplus(module.step_proj(x))
    state, outs = torch.zeros(4, 3, 5, dtype=torch.float64), []
    for t in range(6):
        heads = []
        for h in range(4):
            decay = (-module.log_pace[h].exp() * size[0, t, h]).exp()
            state[h] = decay * state[h].clone() + size[0, t, h] * k[0, t, h // 2, :, None] * v[0, t, h]
            heads.append(state[h].T @ q[0, t, h // 2] + module.skip[h] * v[0, t, h])
        outs.append(torch.stack(heads))
    o = (torch.stack(outs).flatten(1) * silu(module.gate_proj(x))[0]).unflatten(-1, (2, 10))
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.norm.weight
    torch.testing.assert_close(module(x)[0], module.out_proj(o.flatten(1)))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_module_is_that_of_transformers(groups):
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        hidden_size=8, num_heads=4, head_dim=4, expand=2, state_size=6, n_groups=groups, conv_kernel=4
    )
    kind = transformers.models.mamba2.modeling_mamba2.Mamba2Mixer
    theirs = kind(config, layer_idx=0).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = Mamba2(8, 4, causal=True, n_groups=groups, head_dim=6, value_dim=4, bias=False).double()
    copy_mixer(ours, theirs)
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    assert_agree(ours(x), theirs(x), tolerance=1e-5)  # theirs scans in fp32


def test_sizes_begin_between_their_bounds():
    torch.manual_seed(0)
    module = Mamba2(64, 32, causal=True)
    begin = softplus(module.step_proj.bias)
    assert ((begin >= 0.99e-3) & (begin <= 1.01e-1)).all()
    torch.testing.assert_close(module.log_pace.exp(), torch.arange(1.0, 33))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_groups": 3}, "n_groups is 3, but must divide n_heads = 4"),
        ({"n_groups": 0}, "n_groups is 0, but must be at least 1"),
        ({"n_kv_heads": 2}, "n_kv_heads is 2, but must be n_heads = 4"),
        ({"eps": math.nan}, "eps is nan"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba2(8, 4, causal=True, **options)


def test_without_a_convolution_silu_is_applied_to_queries_keys_and_values():
    with_identity, without = Mamba2(8, 2, causal=True), Mamba2(8, 2, causal=True, conv=None)
    weights = with_identity.state_dict()
    without.load_state_dict({name: weights[name] for name in without.state_dict()})
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(without(x), with_identity(x))
