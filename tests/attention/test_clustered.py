"""What is specific to clustered attention: its clusters, and what queries share in them."""

import pytest
import torch
from agreement import assert_same, normal
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import attention
from unrolled.attention.clustered import (
    ClusteredAttention,
    clustered_attention,
    clustered_reference,
    group,
    sign_clusters,
)
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.ops.softmax import softmax_attention
from unrolled.testing import Maker


def heads(T, S, H=4, G=2, B=2, seed=0):
    shapes = (B, T, H, 4), (B, S, G, 4), (B, S, G, 3)
    return [normal(*shape, seed=3 * seed + i).requires_grad_() for i, shape in enumerate(shapes)]


def random_clusters(B, T, H, n_clusters, seed=0):
    return torch.randint(n_clusters, (B, T, H), generator=torch.Generator().manual_seed(seed))


def signs(*shape, seed=0):
    return normal(*shape, seed=seed).sign().float()


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 10), st.integers(1, 5), st.integers(0, 12)),
    grouped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_its_equations(sizes, grouped, seed):
    T, S, n_clusters, n_keys = sizes
    q, k, v = inputs = heads(T, S, G=2 if grouped else 4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    q_padding, padding = (torch.rand(2, n, generator=generator) < 0.3 for n in (T, S))
    q_padding[0, 0], padding[:, 0] = False, False
    cluster = random_clusters(2, T, 4, n_clusters, seed)
    found = clustered_attention(
        q, k, v, cluster, n_clusters, n_keys, q_padding=q_padding, key_padding_mask=padding
    )
    expected = torch.zeros_like(found)
    for b in range(2):
        queries, keys = ~q_padding[b], ~padding[b]
        for h in range(4):
            g = h * k.shape[2] // 4
            if queries.any():
                expected[b, queries, h] = clustered_reference(
                    q[b, queries, h], k[b, keys, g], v[b, keys, g], cluster[b, queries, h], n_keys
                )
    assert_same(found, expected, inputs)


def test_without_keys_of_its_own_a_query_gets_what_the_mean_of_its_cluster_gets():
    q, k, v = heads(6, 9, H=2, G=2)
    cluster = torch.tensor([0, 1, 0, 0, 1, 1])[None, :, None].expand(2, -1, 2)
    found = clustered_attention(q, k, v, cluster, 2, 0)
    means = torch.stack([q[:, [0, 2, 3]].mean(1), q[:, [1, 4, 5]].mean(1)], 1)
    torch.testing.assert_close(found, softmax_attention(means, k, v)[:, [0, 1, 0, 0, 1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"n_clusters": 3, "n_keys": 2}, {"n_clusters": 2, "n_keys": 0}])
def test_few_clusters_keep_the_contract(options):
    check_uncompiled(Maker(ClusteredAttention, {"seed": 1, **options}))


@pytest.mark.compilers
def test_few_clusters_compile():
    module = ClusteredAttention(8, 2, n_clusters=3, n_keys=2).double()
    x = normal(1, 9, 8).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (compiled, module))
    torch.testing.assert_close(found, expected)


def twins(**options):
    module = ClusteredAttention(8, 2, seed=0, **options).double()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=i) / 2)  # queries further apart than when it is new
    softmax = SoftmaxAttention(8, 2).double()
    softmax.load_state_dict({n: w for n, w in module.state_dict().items() if not n.startswith("hash")})
    return module, softmax


@pytest.mark.parametrize("options", [{"n_clusters": 2, "n_keys": 12}, {"n_clusters": 12, "n_keys": 0}])
def test_all_keys_or_a_cluster_for_each_query_is_softmax_attention(options):
    module, softmax = twins(**options)
    x = normal(2, 12, 8)
    torch.testing.assert_close(module(x), softmax(x))
    q, k, v = heads(12, 12)
    own = torch.arange(12)[None, :, None].expand(2, -1, 4) % options["n_clusters"]
    found = clustered_attention(q, k, v, own, **options)  # the clustered form itself
    torch.testing.assert_close(found, softmax_attention(q, k, v))


@pytest.mark.parametrize("n_keys", [0, 3])
def test_a_cluster_for_each_different_query_is_softmax_attention(n_keys):
    module, softmax = twins(n_clusters=5, n_keys=n_keys, bits=62)  # enough for hashes to differ
    different = normal(2, 5, 8)
    times = torch.randint(5, (30,), generator=torch.Generator().manual_seed(0))
    x = different[:, torch.cat([torch.arange(5), times])]
    cluster = module.cluster(module.qkv_proj(x)[..., :8].unflatten(-1, (2, 4)))
    assert all(len(cluster[b, :, h].unique()) == 5 for b in range(2) for h in range(2))
    torch.testing.assert_close(module(x), softmax(x))
    other = normal(2, 35, 8)
    assert (module(other) - softmax(other)).abs().max() > 1e-4  # an approximation it is


def test_own_scores_on_the_best_keys_bring_it_closer_to_softmax_attention():
    q, k, v = (3 * normal(1, 200, 2, 8, seed=i) for i in range(3))
    expected = softmax_attention(q, k, v)
    cluster = ClusteredAttention(16, 2, n_clusters=20, seed=0).double().cluster(q)
    errors = [
        float((clustered_attention(q, k, v, cluster, 20, n) - expected).abs().mean())
        for n in (0, 20, 100, 200)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


def test_clusters_depend_on_no_other_row_no_other_head_and_no_padding():
    module = ClusteredAttention(16, 2, n_clusters=4, seed=0).double()
    q = normal(3, 30, 2, 8)
    padding = torch.rand(3, 30, generator=torch.Generator().manual_seed(0)) < 0.3
    cluster = module.cluster(q, padding)
    for b in range(3):
        for h in range(2):
            alone = module.cluster(q[b : b + 1, ~padding[b], h : h + 1])
            assert torch.equal(alone[0, :, 0], cluster[b, ~padding[b], h])
    extreme = torch.where(padding[..., None, None], 1e4 * normal(3, 30, 2, 8, seed=1), q)
    assert torch.equal(module.cluster(extreme, padding)[~padding], cluster[~padding])


def test_lloyd_finds_clusters_that_are_far_apart():
    centres = signs(4, 32)
    truth = torch.arange(60) % 4
    codes = centres[truth]
    noise = torch.rand(60, 32, generator=torch.Generator().manual_seed(0)) < 0.08
    found = sign_clusters(
        torch.where(noise, -codes, codes)[None], 4, 20, torch.zeros(1, 60, dtype=torch.bool)
    )
    together = found[0, :, None] == found[0]
    assert ((truth[:, None] == truth) == together).float().mean() > 0.85


def test_more_updates_bring_hashes_no_further_from_the_majority_of_their_cluster():
    codes, no_padding = signs(2, 80, 16), torch.zeros(2, 80, dtype=torch.bool)

    def distance(iterations):
        cluster = sign_clusters(codes, 6, iterations, no_padding)
        total = 0
        for row, numbers in zip(codes, cluster, strict=True):
            for c in numbers.unique():
                members = row[numbers == c]
                total += int((members != members.sum(0).sign()).sum())
        return total

    assert distance(20) < distance(0)


@settings(max_examples=40)
@given(T=st.integers(1, 20), n_clusters=st.integers(1, 6), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_blocks_hold_one_cluster_each_and_every_query_once(T, n_clusters, size, seed):
    cluster = random_clusters(3, T, 1, n_clusters, seed).squeeze(-1)
    padding = torch.rand(3, T, generator=torch.Generator().manual_seed(seed)) < 0.3
    members, place, of_block = group(cluster, n_clusters, size, padding)
    for b in range(3):
        valid = ~padding[b]
        places = place[b, valid]
        assert len(set(places.tolist())) == len(places)
        assert torch.equal(of_block[b, places // size], cluster[b, valid])
        assert torch.equal(members[b], torch.bincount(cluster[b, valid], minlength=n_clusters))
        assert (place[b, padding[b]] == of_block.shape[1] * size).all()


def test_a_seed_draws_the_hashes_and_the_state_dict_holds_them():
    one, two, other = (ClusteredAttention(8, 2, n_clusters=3, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.hash.weight, two.hash.weight)
    assert not torch.equal(one.hash.weight, other.hash.weight)
    assert "hash.weight" in one.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_clusters": 0}, "n_clusters is 0, but must be at least 1"),
        ({"n_keys": None}, "n_keys is None, but must be an integer"),
        ({"n_keys": -1}, "n_keys is -1, but must be at least 0"),
        ({"iterations": -1}, "iterations is -1, but must be at least 0"),
        ({"bits": 63}, "bits is 63, but must be between 1 and 62"),
        ({"bits": 0}, "bits is 0, but must be between 1 and 62"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ClusteredAttention(8, 2, **options)


def test_planes_that_hash_queries_need_not_go_through_0():
    layer = attention.load("clustered")(4, 1, n_clusters=2, bits=1)
    layer.hash.weight.copy_(torch.tensor([[[1.0, 0, 0, 0, -1]]]))
    q = torch.tensor([0.5, 2, 0.5, 2]).reshape(1, 4, 1, 1) * torch.ones(4)
    first, second, third, fourth = layer.cluster(q).flatten().tolist()
    assert first == third != second == fourth
