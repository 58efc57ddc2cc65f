"""Attention to a few rows of a batch at a time: nothing but rounding changes."""

import pytest
import torch
from agreement import assert_same_gradients

from unrolled import attention
from unrolled.attention import _row_groups

B, T = 5, 5  # equal, so that a mask [T,S] could be mistaken for one of rows


def masks():
    generator = torch.Generator().manual_seed(0)
    padding = torch.rand(B, T, generator=generator) < 0.3
    pairs = torch.rand(B, 1, T, T, generator=generator) < 0.7
    return [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": pairs[0, 0]},
        {"attn_mask": pairs},
        {"attn_mask": pairs[:1].float(), "key_padding_mask": padding},
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [("performer", {}), ("rfa", {}), ("rfa", {"gate": True}), ("topk", {"n_keys": 2}), ("similarity", {})],
)
@pytest.mark.parametrize("causal", [True, False])
def test_groups_change_nothing(name, options, causal, monkeypatch):
    torch.manual_seed(0)
    if options.get("gate") and not causal:
        pytest.skip("gates are causal")
    module = attention.load(name)(8, 2, causal=causal, rotary=causal, **options).double()
    inputs = [*module.parameters(), torch.randn(B, T, 8, dtype=torch.float64, requires_grad=True)]
    for mask in masks():
        if "attn_mask" in mask and not module.supports.attn_mask:
            continue
        whole = module(inputs[-1], **mask)
        calls = []
        attend = type(module).attend
        with monkeypatch.context() as patch:
            patch.setattr(_row_groups, "CACHED", 2 * module.numbers_per_row(_heads(module, inputs[-1])))
            patch.setattr(type(module), "attend", lambda *x, f=attend, n=calls: n.append(x) or f(*x))
            found = module(inputs[-1], **mask)
        assert len(calls) == 3  # two rows, two rows and one
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
        assert_same_gradients(found, whole, [x for x in inputs if x.requires_grad])


def _heads(module, x):
    return module.heads_of(module.project(x), x, attention.base.Masks())
