"""Mamba: the layer around `unrolled.ops.selective_scan`."""

import pytest
import torch
from agreement import assert_agree
from torch.nn.functional import silu, softplus

from unrolled.attention.mamba import Mamba
from unrolled.contract import UnsupportedError
from unrolled.interop.hf.mamba import copy_mixer
from unrolled.testing import Maker, check_mechanism

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_without_a_convolution_the_contract_is_kept():
    check_mechanism(Maker(Mamba, {"conv": None, "step_rank": 3, "value_dim": 5}))


def test_the_module_is_its_formulas():
    torch.manual_seed(0)
    module = Mamba(8, 2, causal=True, head_dim=3, value_dim=5, step_rank=2, conv=2).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    z = torch.randn(1, 6, 8, dtype=torch.float64)
    x, taps = module.qkv_proj(z), module.short_conv.weight
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    x = silu(before * taps[:, 0] + x * taps[:, 1] + module.short_conv.bias)[0]
    r, b, c = (x @ module.select_proj.weight.T).split([2, 3, 3], -1)
    d = softplus(module.step_proj(r))
    h, outs = torch.zeros(10, 3, dtype=torch.float64), []
    for t in range(6):
        h = (-module.log_pace.exp() * d[t].unsqueeze(1)).exp() * h + (d[t] * x[t]).unsqueeze(1) * b[t]
        outs.append(h @ c[t] + module.skip * x[t])
    o = torch.stack(outs) * silu(module.gate_proj(z))[0]
    torch.testing.assert_close(module(z)[0], module.out_proj(o))


def test_the_module_is_that_of_transformers():
    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=8, state_size=6, expand=3, conv_kernel=3, time_step_rank=2)
    theirs = transformers.models.mamba.modeling_mamba.MambaMixer(config, layer_idx=0).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = Mamba(8, 1, causal=True, head_dim=6, value_dim=24, conv=3, step_rank=2, bias=False).double()
    copy_mixer(ours, theirs)
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    assert_agree(ours(x), theirs(x), tolerance=1e-5)  # theirs scans in fp32


def test_parameters_begin_as_published():
    torch.manual_seed(0)
    module = Mamba(64, 4, causal=True)
    begin = softplus(module.step_proj.bias)
    assert ((begin >= 0.99e-3) & (begin <= 1.01e-1)).all()
    torch.testing.assert_close(module.log_pace.exp(), torch.arange(1.0, 17).expand(64, 16))
    assert (module.step_rank, Mamba(65, 5, causal=True).step_rank) == (4, 5)


def test_a_state_is_continued():
    torch.manual_seed(0)
    module, x = Mamba(8, 2, causal=True).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    first, state = module.prefill(x[:, :3], module.init_state(2))
    second, state = module.prefill(x[:, 3:5], state)
    third, _ = module.step(x[:, 5], state)
    torch.testing.assert_close(torch.cat([first, second, third.unsqueeze(1)], 1), module(x))


def test_the_fastest_paces_are_finite():
    """An infinite rate of decay times the step of 0 at padding would be NaN."""
    torch.manual_seed(0)
    module, x = Mamba(8, 2, causal=True), torch.randn(1, 4, 8)
    with torch.no_grad():
        module.log_pace[0] = 1000.0
    padding = torch.tensor([[True, False, False, False]])
    torch.testing.assert_close(module(x, key_padding_mask=padding)[:, 1:], module(x[:, 1:]))
    module(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def test_options_that_it_cannot_have_are_refused():
    with pytest.raises(UnsupportedError, match="there are no products to rotate"):
        Mamba(8, 2, causal=True, rotary=True)
    with pytest.raises(ValueError, match="n_kv_heads is 1, but must be n_heads = 2"):
        Mamba(8, 2, causal=True, n_kv_heads=1)
    with pytest.raises(ValueError, match="step_rank is 0, but must be at least 1"):
        Mamba(8, 2, causal=True, step_rank=0)
