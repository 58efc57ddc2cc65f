"""Agreement of Nyströmformer with transformers and nystrom-attention, and the smallest examples of where they err.

Opt-in: `make test-oracles` installs them. Theirs start the inverse from norms over the whole batch and all
heads, so they are compared for one row and one head; for several heads, from their start.
"""

import pytest
import torch
from agreement import assert_agree, gradients
from torch import nn

from unrolled.attention.nystromformer import (
    NystromformerAttention,
    iterative_pinv,
    landmarks,
    nystrom_reference,
)
from unrolled.ops.softmax import softmax_attention

HUGGING_FACE = "transformers 5.24.0, NystromformerSelfAttention"
NYSTROM_ATTENTION = "nystrom-attention 0.0.14"


def hugging_face(*, length, n_heads=1, n_landmarks=4, width=None, d_model=8):
    """Theirs and ours with their weights; without `width` the skip's weights are 0, since theirs has no switch."""
    nystromformer = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    torch.manual_seed(0)
    config = nystromformer.NystromformerConfig(
        hidden_size=d_model,
        num_attention_heads=n_heads,
        num_landmarks=n_landmarks,
        segment_means_seq_len=length,
        conv_kernel_size=width or 3,
    )
    theirs = nystromformer.NystromformerSelfAttention(config).eval()
    ours = NystromformerAttention(d_model, n_heads, n_landmarks=n_landmarks, conv_width=width)
    parts = (theirs.query, theirs.key, theirs.value)
    with torch.no_grad():
        ours.qkv_proj.weight.copy_(torch.cat([part.weight for part in parts]))
        ours.qkv_proj.bias.copy_(torch.cat([part.bias for part in parts]))
        if ours.conv is None:
            nn.init.zeros_(theirs.conv.weight)
        else:
            ours.conv.load_state_dict(theirs.conv.state_dict())
    nn.init.eye_(ours.out_proj.weight)
    nn.init.zeros_(ours.out_proj.bias)
    return ours, theirs


@pytest.mark.parametrize("width", [None, 5])
def test_hugging_face(width):
    ours, theirs = hugging_face(length=32, width=width)
    x = torch.randn(1, 32, 8, requires_grad=True)
    found, expected = ours(x), theirs(x)[0]
    what = "nystromformer" if width is None else "nystromformer with its skip"
    assert_agree(found, expected, what, library=HUGGING_FACE)
    parameters = list(theirs.query.parameters())
    theirs_x, theirs_weight, theirs_bias = gradients(expected, [x, *parameters])
    ours_x, ours_weight, ours_bias = gradients(found, [x, *ours.qkv_proj.parameters()])
    assert_agree(ours_x, theirs_x, f"{what}: gradient of x", library=HUGGING_FACE)
    assert_agree(ours_weight[:8], theirs_weight, "gradient of the query projection")
    assert_agree(ours_bias[:8], theirs_bias, "gradient of its bias")


def test_hugging_face_with_several_heads_from_their_start():
    ours, theirs = hugging_face(length=32, n_heads=4, d_model=16)
    x = torch.randn(1, 32, 16)
    q, k, v = (y.unflatten(-1, (4, 4)) for y in ours.qkv_proj(x).split(16, dim=-1))
    q_means, k_means, a = landmarks(q, k, 4, None, None)
    inverse = iterative_pinv(a, start=a.mT / a.sum(-2).max())
    values = (inverse @ softmax_attention(q_means, k, v).transpose(1, 2)).transpose(1, 2)
    found = softmax_attention(q, k_means, values).flatten(2)
    assert_agree(found, theirs(x)[0], "nystromformer, 4 heads from their start", library=HUGGING_FACE)


def test_their_default_is_softmax_attention():
    configuration = pytest.importorskip("transformers.models.nystromformer.configuration_nystromformer")
    default = configuration.NystromformerConfig()
    assert default.segment_means_seq_len == default.num_landmarks
    ours, theirs = hugging_face(length=4, n_landmarks=4)
    x = torch.randn(1, 12, 8)
    softmax = softmax_attention(*(y.unsqueeze(2) for y in (theirs.query(x), theirs.key(x), theirs.value(x))))
    assert_agree(theirs(x)[0], softmax.flatten(2), "their default configuration against softmax attention")
    assert (ours(x) - theirs(x)[0]).abs().max() > 1e-3


def test_their_mask_lets_the_padding_through():
    ours, theirs = hugging_face(length=4, n_landmarks=2)
    x = torch.randn(1, 4, 8)
    other = torch.cat([x[:, :3], torch.randn(1, 1, 8)], 1)  # another padding
    padding = torch.tensor([[False, False, False, True]])
    added = torch.zeros(1, 1, 1, 4).masked_fill(padding, torch.finfo(torch.float32).min)
    theirs_moves = (theirs(other, added)[0] - theirs(x, added)[0])[:, :3]
    ours_moves = (ours(other, key_padding_mask=padding) - ours(x, key_padding_mask=padding))[:, :3]
    assert theirs_moves.abs().max() > 1e-3
    assert ours_moves.abs().max() == 0


def test_their_wrong_length_mixes_the_rows_of_a_batch():
    ours, theirs = hugging_face(length=8, n_landmarks=2)
    x = torch.randn(2, 4, 8)  # half the length in their config
    other = torch.cat([x[:1], torch.randn(1, 4, 8)])
    assert (theirs(other)[0] - theirs(x)[0])[0].abs().max() > 1e-3
    assert (ours(other) - ours(x))[0].abs().max() == 0


def test_their_start_makes_a_row_depend_on_the_others():
    ours, theirs = hugging_face(length=8, n_landmarks=4)
    x = torch.randn(2, 8, 8)
    other = torch.cat([x[:1], 12 * torch.randn(1, 8, 8)])
    assert (theirs(other)[0] - theirs(x)[0])[0].abs().max() > 1e-3
    assert (ours(other) - ours(x))[0].abs().max() == 0


def lucidrains(*, n_landmarks=4, width=None):
    """Theirs and ours with their weights."""
    nystrom = pytest.importorskip("nystrom_attention")
    torch.manual_seed(0)
    skip = {"residual": False} if width is None else {"residual_conv_kernel": width}
    theirs = nystrom.NystromAttention(8, 8, heads=1, num_landmarks=n_landmarks, **skip).eval()
    ours = NystromformerAttention(8, 1, n_landmarks=n_landmarks, conv_width=width)
    with torch.no_grad():
        ours.qkv_proj.weight.copy_(theirs.to_qkv.weight)
        nn.init.zeros_(ours.qkv_proj.bias)
        if ours.conv is not None:
            ours.conv.load_state_dict(theirs.res_conv.state_dict())
        ours.out_proj.load_state_dict(theirs.to_out[0].state_dict())
    return ours, theirs


@pytest.mark.parametrize("width", [None, 5])
def test_nystrom_attention(width):
    ours, theirs = lucidrains(width=width)
    x = torch.randn(1, 32, 8, requires_grad=True)
    found, expected = ours(x), theirs(x)
    what = "nystromformer" if width is None else "nystromformer with its skip"
    assert_agree(found, expected, what, library=NYSTROM_ATTENTION)
    theirs_x, theirs_weight = gradients(expected, [x, theirs.to_qkv.weight])
    ours_x, ours_weight = gradients(found, [x, ours.qkv_proj.weight])
    assert_agree(ours_x, theirs_x, f"{what}: gradient of x", library=NYSTROM_ATTENTION)
    assert_agree(ours_weight, theirs_weight, "gradient of the projections")


def test_nystrom_attention_with_a_mask_that_leaves_the_segments_alike():
    ours, theirs = lucidrains()
    x, keep = torch.randn(1, 32, 8), torch.arange(32)[None] % 8 < 5  # 5 valid tokens in each segment of 8
    found, expected = ours(x, key_padding_mask=~keep), theirs(x, mask=keep)
    assert_agree(found[keep], expected[keep], "nystromformer with padding", library=NYSTROM_ATTENTION)


def test_theirs_attends_to_zeros_where_landmarks_do_not_divide_the_length():
    ours, theirs = lucidrains(n_landmarks=2)
    x = torch.randn(1, 3, 8)
    zero_first = torch.cat([torch.zeros(1, 1, 8), x], 1)
    assert_agree(theirs(x), theirs(zero_first)[:, 1:], "three tokens against a zero and three tokens")
    expected = nystrom_reference(*theirs.to_qkv(x)[0].chunk(3, dim=-1), 2)
    assert_agree(ours(x)[0], theirs.to_out(expected), "ours against the equations")
    assert (theirs(x) - ours(x)).abs().max() > 1e-3
