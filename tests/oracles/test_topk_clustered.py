"""Top-k and clustered attention against idiap's own, in fp32, the only type that its kernels know."""

import pytest
import torch
from agreement import assert_agree, gradients
from oracles.comparing import assert_all_agree

from unrolled.attention.clustered import clustered_attention
from unrolled.attention.topk import topk_attention

LIBRARY = "pytorch-fast-transformers 0.4.0"


def random_inputs(T, S, H=2, D=8, M=5):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, T, H, D), (2, S, H, D), (2, S, H, M)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("causal", [True, False])
def test_exact_topk(causal):
    attention = pytest.importorskip("fast_transformers.attention")
    masking = pytest.importorskip("fast_transformers.masking")
    q, k, v = random_inputs(60, 60)
    theirs = attention.ExactTopKAttention(topk=16, attention_dropout=0.0)
    mask = masking.TriangularCausalMask(60) if causal else masking.FullMask(60)
    lengths = masking.LengthMask(torch.tensor([60, 40]), max_len=60)
    expected = theirs(q, k, v, mask, lengths, lengths)
    padding = torch.arange(60) >= torch.tensor([[60], [40]])
    found = topk_attention(q, k, v, 16, causal=causal, key_padding_mask=padding)
    what = f"top-k attention, causal={causal}"
    assert_all_agree(found, expected, (q, k, v), what, library=LIBRARY)


@pytest.mark.parametrize("n_keys", [0, 16])
def test_clustered_with_the_same_clusters(n_keys):
    attention = pytest.importorskip("fast_transformers.attention")
    masking = pytest.importorskip("fast_transformers.masking")
    improved = pytest.importorskip("fast_transformers.attention.improved_clustered_attention")
    q, k, v = random_inputs(60, 70)
    generator = torch.Generator().manual_seed(1)
    cluster = torch.stack([torch.randperm(60, generator=generator) % 7 for _ in range(4)]).reshape(2, 2, 60)
    if n_keys:
        theirs = improved.ImprovedClusteredAttention(7, topk=n_keys, attention_dropout=0.0)
    else:
        theirs = attention.ClusteredAttention(7, attention_dropout=0.0)
    ordered, order = cluster.sort(dim=-1)
    counts = torch.nn.functional.one_hot(cluster, 7).sum(2)
    theirs._create_query_groups = lambda *_: ((ordered.int(), counts.int()), order)
    full, S = masking.FullMask(60, 70), masking.LengthMask(torch.tensor([70, 50]), max_len=70)
    expected = theirs(q, k, v, full, masking.LengthMask(torch.tensor([60, 60]), max_len=60), S)
    padding = torch.arange(70) >= torch.tensor([[70], [50]])
    found = clustered_attention(q, k, v, cluster.transpose(1, 2), 7, n_keys, key_padding_mask=padding)
    what = "improved clustered attention" if n_keys else "clustered attention"
    assert_agree(found, expected, what, library=LIBRARY)
    if n_keys:  # their gradient takes the weight of the kept keys for a constant
        ours = gradients(with_constant_mass(q, k, v, cluster, n_keys, padding), (q, k, v))
        assert (gradients(found, (q, k, v))[0] - ours[0]).abs().max() > 1e-2
    else:
        ours = gradients(found, (q, k, v))
    for name, x, y in zip("qkv", ours, gradients(expected, (q, k, v)), strict=True):
        assert_agree(x, y, f"{what}, gradient of {name}" + " with m constant" * bool(n_keys), library=LIBRARY)


def with_constant_mass(q, k, v, cluster, n_keys, padding):
    """The equations, with m_c detached."""
    heads = torch.empty(*q.shape[:3], v.shape[-1])
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            queries, keys, values = (
                q[b, :, h] / q.shape[-1] ** 0.5,
                k[b, ~padding[b], h],
                v[b, ~padding[b], h],
            )
            for c in cluster[b, h].unique():
                members = cluster[b, h] == c
                shared = (keys @ queries[members].mean(0)).softmax(-1)
                top = shared.topk(n_keys).indices
                own = (queries[members] @ keys[top].mT).softmax(-1)
                o = shared[top].sum().detach() * own @ values[top] + shared.index_fill(0, top, 0) @ values
                heads[b, members, h] = o
    return heads
