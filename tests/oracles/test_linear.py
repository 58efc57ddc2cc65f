"""Agreement with independent implementations. Opt-in: `make test-oracles` installs them.

Both are run in fp32, the only type that the first one knows.
"""

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree, random_inputs

from unrolled.ops.feature_maps import Elu
from unrolled.ops.linear import LinearState, linear_attention, linear_attention_step


@pytest.mark.parametrize("causal", [True, False])
def test_idiap_fast_transformers(causal):
    attention = pytest.importorskip("fast_transformers.attention")
    masking = pytest.importorskip("fast_transformers.masking")
    q, k, v = random_inputs()
    T = q.shape[1]
    kind = attention.CausalLinearAttention if causal else attention.LinearAttention
    mask = masking.TriangularCausalMask(T) if causal else masking.FullMask(T)
    lengths = masking.LengthMask(torch.tensor([T, T - 20]), max_len=T)
    theirs = kind(q.shape[-1])(q, k, v, mask, lengths, lengths)
    phi = Elu(q.shape[-1])
    padding = torch.arange(T) >= torch.tensor([[T], [T - 20]])
    ours = linear_attention(phi.phi(q), phi.phi(k), v, causal=causal, key_padding_mask=padding)
    what, library = f"linear attention, causal={causal}", "pytorch-fast-transformers 0.4.0"
    assert_all_agree(ours, theirs, (q, k, v), what, library=library)


def test_idiap_recurrent_step():
    recurrent = pytest.importorskip("fast_transformers.recurrent.attention")
    q, k, v = (x.detach() for x in random_inputs(T=20))
    theirs, memory = recurrent.RecurrentLinearAttention(q.shape[-1]), None
    phi, state = Elu(q.shape[-1]), LinearState(torch.zeros(2, 2, 8, 5), torch.zeros(2, 2, 8))
    for t in range(20):
        y, memory = theirs(q[:, t], k[:, t], v[:, t], memory)
        o, state = linear_attention_step(phi.phi(q[:, t]), phi.phi(k[:, t]), v[:, t], state)
        assert_agree(o, y, f"step {t}")


@pytest.mark.parametrize("normalize", [True, False])
def test_fla_naive_reference(normalize):
    naive = pytest.importorskip("fla.ops.linear_attn.naive")
    q, k, v = random_inputs(T=128)
    phi = Elu(q.shape[-1])
    theirs = naive.naive_recurrent_linear_attn(phi.phi(q), phi.phi(k), v, scale=1.0, normalize=normalize)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    ours = linear_attention(phi.phi(q), phi.phi(k), v, causal=True, normalize=normalize)
    what = f"linear attention, normalize={normalize}"
    assert_all_agree(ours, theirs, (q, k, v), what, library="fla-core 0.6.0")


def test_fla_gated_naive_reference():
    naive = pytest.importorskip("fla.ops.simple_gla.naive")
    q, k, v = random_inputs(T=100)
    gates = -torch.rand(2, 100, 2)
    theirs, _ = naive.naive_recurrent_simple_gla(q, k, v, gates, scale=1.0)
    ours = linear_attention(q, k, v, causal=True, log_decay=gates, normalize=False)
    assert_agree(ours, theirs, "linear attention with gates", library="fla-core 0.6.0")
