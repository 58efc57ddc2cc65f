"""The layer of RWKV-7 against the `rwkv` package of its author, and its rule against fla."""

import importlib

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree
from torch.nn.functional import normalize

from unrolled.attention.rwkv7 import MIXTURES, RWKV7
from unrolled.ops.dplr import dplr

LIBRARY = "rwkv 0.8.32"


@pytest.mark.parametrize("form", ["recurrence", "chunkwise"])
def test_fla_diagonal_plus_low_rank(form):
    naive = pytest.importorskip("fla.ops.generalized_delta_rule.dplr.naive")
    generator = torch.Generator().manual_seed(0)
    q, k, v, a = torch.randn(4, 2, 192, 2, 8, generator=generator).unbind()
    a = normalize(a, dim=-1)
    b = -a * torch.rand(2, 192, 2, 1, generator=generator)
    log_decay = -0.2 * torch.rand(q.shape, generator=generator)
    inputs = [x.requires_grad_() for x in (q, k, v, a.detach(), b.detach(), log_decay)]
    q, k, v, a, b, log_decay = inputs
    heads_first = [x.transpose(1, 2) for x in inputs]
    theirs, theirs_after = getattr(naive, f"dplr_{form}")(*heads_first)
    ours, after = dplr(q * 8**-0.5, k, v, a, b, log_decay)
    what = f"diagonal plus low rank, {form}"
    assert_all_agree(ours, theirs.transpose(1, 2), inputs, what, library="fla-core 0.6.0")
    assert_agree(after, theirs_after, f"{what}, state", library="fla-core 0.6.0")


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_first_layer(monkeypatch):
    for name, value in {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("rwkv")
    theirs = importlib.import_module("rwkv.model")
    torch.manual_seed(0)
    module = RWKV7(16, 2, causal=True, bias=False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.5)
    x = torch.randn(70, 16)
    mix = dict(zip(MIXTURES, module.mix, strict=True))
    values = dict.fromkeys(("v0", "v1", "v2"), x.new_zeros(1))  # the first layer has no values before it
    own = {
        **{f"x_{z}": mix[z] for z in MIXTURES},
        **values,
        "w0": module.decay_up.bias,
        "w1": module.decay_down.weight.T,
        "w2": module.decay_up.weight.T,
        "a0": module.rate_up.bias,
        "a1": module.rate_down.weight.T,
        "a2": module.rate_up.weight.T,
        "g1": module.gate_down.weight.T,
        "g2": module.gate_up.weight.T,
        "k_k": module.erased.flatten(),
        "k_a": module.replaced.flatten(),
        "r_k": module.bonus.flatten(),
        **dict(zip(("R_", "K_", "V_"), (w.T for w in module.qkv_proj.weight.chunk(3)), strict=True)),
        "O_": module.out_proj.weight.T,
        "ln_w": module.norm_weight,
        "ln_b": module.norm_bias,
    }
    kv, last = x.new_zeros(2, 8, 8), x.new_zeros(16)
    begin = {"layer_id": 0, "H": 2, "N": 8, "v_first": None}
    y, last, kv, _ = theirs.RWKV_x070_TMix_seq(x=x[:60], x_prev=last, state=kv, **begin, **own)
    ours, state = module.prefill(x[None, :60], module.init_state(1))
    assert_agree(ours[0], y, "RWKV-7, first layer", library=LIBRARY)
    assert_agree(state.kv[0], kv.mT, "RWKV-7, state", library=LIBRARY)
    for x_t in x[60:]:
        y, last, kv, _ = theirs.RWKV_x070_TMix_one(x=x_t, x_prev=last, state=kv, **begin, **own)
        ours, state = module.step(x_t[None], state)
        assert_agree(ours[0], y, "RWKV-7, a token", library=LIBRARY)
