"""Additive attention against its equations, written out."""

import pytest
import torch
from agreement import assert_same

from unrolled.alignment import base
from unrolled.alignment.bahdanau import BahdanauAttention


def noisy(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def inputs(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def written_out(module, query, memory, padding):
    """Eq. 5 and 6, one number at a time."""
    W, U, b, v = module.query_proj.weight, module.key_proj.weight, module.key_proj.bias, module.v
    rows = []
    for i, memories in enumerate(memory):
        read = [s for s in range(len(memories)) if not padding[i, s]]
        for h in query[i]:
            e = torch.stack([v @ torch.tanh(W @ h + U @ memories[s] + b) for s in read])
            a = e.exp() / e.exp().sum()
            rows.append(sum(a[k] * memories[s] for k, s in enumerate(read)))
    return torch.stack(rows).view(*query.shape[:2], -1)


@pytest.mark.parametrize("chunk", [1, 100, 2**22])
def test_the_definition(monkeypatch, chunk):
    monkeypatch.setattr(base, "CHUNK", chunk)
    module = noisy(BahdanauAttention(3, 4, attention_dim=6).double())
    query, memory = inputs((2, 5, 3), (2, 7, 4))
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, [0, 3, 6]] = True
    found, expected = (
        module(query, memory, key_padding_mask=padding),
        written_out(module, query, memory, padding),
    )
    inputs_and_weights = [query, memory, *module.parameters()]
    assert_same(found, expected, inputs_and_weights, rtol=1e-12, atol=1e-12)


def test_it_begins_with_equal_weights_and_small_projections():
    module = BahdanauAttention(300, 200)
    query, memory = (x.float().detach() for x in inputs((1, 2, 300), (1, 8, 200)))
    _, weights, _ = module.recall(query, module.read(memory))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 8))
    for layer in (module.query_proj, module.key_proj):
        assert abs(layer.weight.std() / 0.001 - 1) < 0.02
    assert not module.key_proj.bias.any()


def test_the_memory_is_projected_once(monkeypatch):
    module = noisy(BahdanauAttention(3).double())
    query, memory = inputs((2, 5, 3), (2, 7, 3))
    _, _, state = module.recall(query[:, :1], module.read(memory))
    monkeypatch.setattr(module, "project_memory", None)
    for h in query.unbind(1):
        _, _, state = module.recall(h.unsqueeze(1), state)


@pytest.mark.parametrize("options", [{"query_dim": 0}, {"memory_dim": 0}, {"attention_dim": 0}])
def test_sizes_below_1_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is 0, but must be a whole number"):
        BahdanauAttention(**{"query_dim": 3} | options)
