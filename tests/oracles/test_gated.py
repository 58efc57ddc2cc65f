"""Agreement of the recurrences with gates with independent implementations. Opt-in, see `test_linear`.

Theirs compute in fp32.
"""

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree, random_inputs
from torch.nn.functional import logsigmoid, softplus

from unrolled.attention.retention import log_gamma, retention
from unrolled.ops.gla import diagonal_linear_attention
from unrolled.ops.linear import linear_attention
from unrolled.ops.selective_scan import selective_scan
from unrolled.ops.wkv import wkv


def test_fla_naive_retention():
    naive = pytest.importorskip("fla.ops.retention.naive")
    q, k, v = random_inputs(H=4)
    theirs = naive.naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    ours, _ = retention(q, k, v, log_gamma(4))
    assert_all_agree(ours, theirs, (q, k, v), "retention", library="fla-core 0.6.0")


def test_fla_naive_gated_linear_attention():
    naive = pytest.importorskip("fla.ops.gla.naive")
    q, k, v = random_inputs()
    gates = (logsigmoid(torch.randn(q.shape)) / 16).requires_grad_()
    state = torch.randn(2, 2, 8, 5).requires_grad_()
    theirs, theirs_after = naive.naive_recurrent_gla(q, k, v, gates, state, output_final_state=True)
    ours, after = diagonal_linear_attention(q * 8**-0.5, k, v, gates, state=state, return_state=True)
    inputs = (q, k, v, gates, state)
    assert_all_agree(ours, theirs, inputs, "gated linear attention", library="fla-core 0.6.0")
    assert_agree(after, theirs_after, "gated linear attention, state", library="fla-core 0.6.0")


def test_hugging_face_lightning_attention():
    """Retention with other rates, features silu(x), a norm over all heads and a sigmoid gate."""
    minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = pytest.importorskip("transformers").MiniMaxConfig(
        hidden_size=16, num_attention_heads=4, head_dim=4, num_hidden_layers=3, block_size=32,
        layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    module = minimax.MiniMaxLightningAttention(config, layer_idx=1)
    x = torch.randn(2, 100, 16)
    theirs, theirs_after = module(x, None, None)
    q, k, v = module.act_fn(module.qkv_proj(x)).unflatten(-1, (4, 12)).split(4, dim=-1)
    ours, after = retention(q * 2, k, v, -module.slope_rate.flatten())  # 2 = sqrt(D): theirs does not scale
    ours = module.out_proj(module.output_gate(x).sigmoid() * module.norm(ours.flatten(-2)))
    assert_agree(ours, theirs, "lightning attention (MiniMax)", library="transformers 5.24.0")
    assert_agree(after, theirs_after, "lightning attention, state", library="transformers 5.24.0")


def test_hugging_face_mamba_2():
    """Its recurrence (SSD) is linear attention with q = C, k = B, v = dt x and gates exp(dt A)."""
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    C, B, x = random_inputs(H=4)
    C, B = C[:, :, ::2], B[:, :, ::2]  # two groups, each shared by two heads
    generator = torch.Generator().manual_seed(1)
    dt, A, D = (torch.randn(s, generator=generator) for s in ((2, 150, 4), (4,), (4,)))
    A = -A.exp()
    theirs, theirs_after = mamba2.mamba2_chunk_scan(
        x, dt, A, B, C, chunk_size=32, D=D, dt_softplus=True, return_final_states=True
    )
    dt = softplus(dt)
    q, k, v = C.repeat_interleave(2, 2), B.repeat_interleave(2, 2), x * dt.unsqueeze(-1)
    ours, after = linear_attention(q, k, v, causal=True, log_decay=A * dt, normalize=False, return_state=True)
    ours = ours + D.unsqueeze(-1) * x
    assert_agree(ours, theirs.view(ours.shape), "Mamba-2's recurrence", library="transformers 5.24.0")
    assert_agree(after.kv, theirs_after.mT, "Mamba-2's recurrence, state", library="transformers 5.24.0")


def test_hugging_face_selective_scan_of_mamba():
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    generator = torch.Generator().manual_seed(1)
    x, z, b, c, a = (
        torch.randn(size, generator=generator) for size in (*[(2, 150, 6)] * 2, *[(2, 150, 5)] * 2, (6, 5))
    )
    inputs = [y.requires_grad_() for y in (x, softplus(z), -a.exp(), b, c)]
    x, dt, a, b, c = inputs
    theirs, theirs_after = mamba.mamba_selective_scan(x.mT, dt.mT, a, b.mT, c.mT, return_last_state=True)
    ours, after = selective_scan(x, dt, a, b, c)
    assert_all_agree(ours, theirs.mT, inputs, "selective scan of Mamba", library="transformers 5.24.0")
    assert_agree(after, theirs_after, "selective scan of Mamba, state", library="transformers 5.24.0")


def test_hugging_face_averages_of_rwkv_4():
    """Its decays are the logarithms of ours, negated."""
    rwkv = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    generator = torch.Generator().manual_seed(1)
    sizes = ((2, 150, 6), (2, 150, 6), (6,), (6,))
    inputs = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    k, v, rates, bonus = inputs
    theirs, theirs_after = rwkv.rwkv_linear_attention_cpu(rates, bonus, k, v, return_state=True)
    ours, after = wkv(k, v, -rates.exp(), bonus)
    assert_all_agree(ours, theirs, inputs, "averages of RWKV-4", library="transformers 5.24.0")
    theirs_after = torch.stack(theirs_after, dim=1)
    assert_agree(after, theirs_after, "averages of RWKV-4, state", library="transformers 5.24.0")
