"""Additive and multiplicative attention of JoeyNMT and Keras. Opt-in: `make test-oracles`."""

import os

import pytest
import torch
from agreement import assert_agree, gradients

from unrolled.alignment.bahdanau import BahdanauAttention
from unrolled.alignment.base import additive_scores
from unrolled.alignment.luong import LuongAttention

pytestmark = pytest.mark.oracles
Q, M, B, T, S = 6, 10, 3, 4, 7


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (B, T, Q), (B, S, M)
    query, memory = (
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes
    )
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, 5:] = padding[2, 3:] = True
    return query, memory, padding


def noisy(module):
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def of_joeynmt(theirs, query, memory, padding):
    theirs.compute_proj_keys(memory)
    results = []
    for h in query.split(1, 1):
        if hasattr(theirs, "compute_proj_query"):
            theirs.compute_proj_query(h)
        results.append(theirs(query=h, mask=~padding.unsqueeze(1), values=memory))
    return [torch.cat(parts, 1) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("name", ["additive", "general"])
def test_joeynmt(name):
    """Its classes come without their package's other modules, which is all that is imported of it."""
    joeynmt = pytest.importorskip("joeynmt.attention")
    from importlib.metadata import version

    library = f"JoeyNMT {version('joeynmt')}"
    query, memory, padding = inputs()
    if name == "additive":
        ours = noisy(BahdanauAttention(Q, M, attention_dim=8, bias=False).double())
        theirs = joeynmt.BahdanauAttention(hidden_size=8, key_size=M, query_size=Q).double()
        theirs.key_layer.weight, theirs.query_layer.weight = ours.key_proj.weight, ours.query_proj.weight
        theirs.energy_layer.weight = torch.nn.Parameter(ours.v.data.unsqueeze(0))
    else:
        ours = noisy(LuongAttention(Q, M, score="general").double())
        theirs = joeynmt.LuongAttention(hidden_size=Q, key_size=M).double()
        theirs.key_layer.weight = ours.score.key_proj.weight
    context, weights = of_joeynmt(theirs, query, memory, padding)
    found, shares, _ = ours.recall(query, ours.read(memory, key_padding_mask=padding))
    assert_agree(found, context, f"{name} attention, contexts", tolerance=1e-12, library=library)
    assert_agree(shares, weights, f"{name} attention, weights", tolerance=1e-12, library=library)
    pairs = zip(gradients(found, [query, memory]), gradients(context, [query, memory]), strict=True)
    for ours_too, its in pairs:
        assert_agree(ours_too, its, f"{name} attention, gradients", tolerance=1e-12, library=library)


@pytest.fixture
def keras():
    """Keras on torch. Its products of matrices are fp32, whatever it is given."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    return pytest.importorskip("keras")


def test_keras_additive_attention(keras):
    query, memory, padding = inputs()
    ours = noisy(BahdanauAttention(Q, M, attention_dim=8, bias=False).double())
    theirs = keras.layers.AdditiveAttention(use_scale=True, dtype="float64")
    q, k = ours.query_proj(query), ours.key_proj(memory)
    theirs.build([q.shape, memory.shape, k.shape])
    theirs.scale.assign(ours.v.detach())
    expected, shares = theirs([q, memory, k], mask=[None, ~padding], return_attention_scores=True)
    found, weights, _ = ours.recall(query, ours.read(memory, key_padding_mask=padding))
    library = f"Keras {keras.__version__}"
    assert_agree(found, expected, "additive attention, contexts", tolerance=1e-6, library=library)
    assert_agree(weights, shares, "additive attention, weights", tolerance=1e-12, library=library)
    scores = additive_scores(q, k, ours.v)
    assert_agree(scores, theirs._calculate_scores(q, k), "additive scores", tolerance=1e-12, library=library)


def test_keras_dot_attention(keras):
    query, _, padding = inputs()
    memory = torch.randn(B, S, Q, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    theirs = keras.layers.Attention(score_mode="dot", dtype="float64")
    expected = theirs([query, memory, memory], mask=[None, ~padding])
    found = LuongAttention(Q, score="dot")(query, memory, key_padding_mask=padding)
    assert_agree(found, expected, "dot attention", tolerance=1e-6, library=f"Keras {keras.__version__}")
