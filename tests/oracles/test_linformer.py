"""Agreement of Linformer with the package `linformer`. Opt-in: `make test-oracles` installs it."""

import pytest
import torch
from agreement import assert_agree, gradients
from torch import nn

from unrolled.attention.linformer import LinformerAttention

LIBRARY = "linformer 0.2.3"


def pair(*, share_kv=False, one_kv_head=False):
    """Theirs, and ours with their weights: for 32 tokens of width 16, 4 heads and 8 slots."""
    linformer = pytest.importorskip("linformer")
    torch.manual_seed(0)
    theirs = linformer.LinformerSelfAttention(
        16, 32, k=8, heads=4, share_kv=share_kv, one_kv_head=one_kv_head
    )
    sharing = "key-value" if share_kv else "headwise"
    ours = LinformerAttention(
        16, 4, rank=8, max_length=32, sharing=sharing, n_kv_heads=1 if one_kv_head else 4
    )
    to_v = theirs.to_k if share_kv else theirs.to_v  # with share_kv theirs has values that are the keys
    with torch.no_grad():
        ours.qkv_proj.weight.copy_(torch.cat([theirs.to_q.weight, theirs.to_k.weight, to_v.weight]))
        nn.init.zeros_(ours.qkv_proj.bias)
        ours.projection.weight.copy_(theirs.proj_k.T)
        if ours.value_projection is not None:
            ours.value_projection.weight.copy_(theirs.proj_v.T)
        ours.out_proj.load_state_dict(theirs.to_out.state_dict())
    return ours, theirs


@pytest.mark.parametrize("options", [{}, {"share_kv": True}, {"one_kv_head": True}], ids=str)
@pytest.mark.parametrize("length", [32, 20])
def test_linformer(options, length):
    ours, theirs = pair(**options)
    x = torch.randn(2, length, 16, requires_grad=True)
    found, expected = ours(x), theirs(x)
    what = ", ".join(["linformer", f"{length} of 32 tokens", *options])
    assert_agree(found, expected, what, library=LIBRARY)
    ours_x, ours_e, ours_qkv = gradients(found, [x, ours.projection.weight, ours.qkv_proj.weight])
    theirs_x, theirs_e, theirs_q = gradients(expected, [x, theirs.proj_k, theirs.to_q.weight])
    assert_agree(ours_x, theirs_x, f"{what}: gradient of x", library=LIBRARY)
    assert_agree(ours_e, theirs_e.T, "gradient of E")
    assert_agree(ours_qkv[:16], theirs_q, "gradient of the query projection")


def test_linformer_reading_another_sequence():
    ours, theirs = pair()
    x, memory = torch.randn(2, 50, 16), torch.randn(2, 20, 16)
    assert_agree(ours(x, memory), theirs(x, context=memory), "linformer, cross-attention", library=LIBRARY)


def test_theirs_accepts_a_mask_and_attends_to_the_padding():
    ours, theirs = pair()
    x = torch.randn(1, 2, 16)
    other = torch.cat([x[:, :1], torch.randn(1, 1, 16)], 1)  # another padding
    padding = torch.tensor([[False, True]])
    theirs_moves = theirs(other, input_mask=~padding)[:, 0] - theirs(x, input_mask=~padding)[:, 0]
    ours_moves = ours(other, key_padding_mask=padding)[:, 0] - ours(x, key_padding_mask=padding)[:, 0]
    assert theirs_moves.abs().max() > 1e-3
    assert ours_moves.abs().max() == 0
