"""Random feature attention against pytorch-fast-transformers' random Fourier features, with the same rows.

Its features take any vectors and have no gate: they are given unit vectors, for which both are one function.
"""

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree

from unrolled.attention.rfa.features import RfaMap
from unrolled.attention.rfa.sums import rfa_attention, signed_rfa_attention

LIBRARY = "pytorch-fast-transformers 0.4.0"


@pytest.mark.parametrize("causal", [True, False])
def test_fourier_features(causal):
    attention = pytest.importorskip("fast_transformers.attention")
    masking = pytest.importorskip("fast_transformers.masking")
    maps = pytest.importorskip("fast_transformers.feature_maps")
    generator = torch.Generator().manual_seed(0)
    T = 100
    inputs = [torch.randn(2, T, 2, 16, generator=generator).requires_grad_() for _ in range(3)]
    q, k, v = inputs
    phi = RfaMap(1, 16, "fourier", 64, "orthogonal", seed=0)
    kind = attention.CausalLinearAttention if causal else attention.LinearAttention
    features = maps.RandomFourierFeatures.factory(n_dims=128, softmax_temp=1.0, deterministic_eval=True)
    theirs = kind(16, features).eval()
    theirs.feature_map.omega = phi.projection.weight[0].T.contiguous()
    mask = masking.TriangularCausalMask(T) if causal else masking.FullMask(T)
    lengths = masking.LengthMask(torch.tensor([T, T]))
    q_unit, k_unit = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    expected = theirs(q_unit, k_unit, v, mask, lengths, lengths)
    found, _ = signed_rfa_attention(phi(q), phi(k), v, causal=causal)
    what = f"random feature attention, causal={causal}"
    assert_all_agree(found, expected, inputs, what, library=LIBRARY)


def test_gates():
    """The recurrence of RFA-Gate is fla's simple GLA with keys times 1 - g; the quotient of two is taken here."""
    naive = pytest.importorskip("fla.ops.simple_gla.naive")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 50, 2, 16, generator=generator) for _ in range(3))
    logits = torch.randn(2, 50, 2, generator=generator) + 2
    phi = RfaMap(1, 16, "arccos", 64, "orthogonal", seed=0)
    q, k = phi(q).detach(), phi(k).detach()
    keys, log_g = k * torch.sigmoid(-logits).unsqueeze(-1), torch.nn.functional.logsigmoid(logits)
    sums, _ = naive.naive_recurrent_simple_gla(q, keys, v, log_g, scale=1.0)
    divisors, _ = naive.naive_recurrent_simple_gla(q, keys, torch.ones_like(v), log_g, scale=1.0)
    found, _ = rfa_attention(q, k, v, gate_logits=logits, causal=True)
    assert_agree(found, sums / divisors, "RFA-Gate", library="fla-core 0.6.0")
