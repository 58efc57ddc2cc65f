"""Agreement of Longformer with transformers, and the smallest examples of what theirs cannot do.

Opt-in: `make test-oracles` installs it.
"""

import pytest
import torch
from agreement import assert_agree, gradients
from torch import nn

from unrolled.attention.longformer import LongformerAttention

HUGGING_FACE = "transformers 5.24.0, LongformerSelfAttention"


class HuggingFace(nn.Module):
    """Theirs, called as its model does."""

    def __init__(self, window, d_model=16, n_heads=4):
        super().__init__()
        longformer = pytest.importorskip("transformers.models.longformer.modeling_longformer")
        config = longformer.LongformerConfig(
            hidden_size=d_model, num_attention_heads=n_heads, attention_window=[window], num_hidden_layers=1
        )
        self.attention = longformer.LongformerSelfAttention(config, layer_id=0).eval()

    def forward(self, x, is_global, padding):
        mask = torch.where(padding, -10000.0, is_global.to(x.dtype))
        return self.attention(
            x,
            attention_mask=mask,
            is_index_masked=padding,
            is_index_global_attn=is_global,
            is_global_attn=bool(is_global.any()),
        )[0]


def both(window):
    """Theirs and ours with their weights."""
    torch.manual_seed(0)
    theirs, ours = HuggingFace(window), LongformerAttention(16, 4, window=window)
    attention = theirs.attention
    for projection, parts in (
        (ours.qkv_proj, (attention.query, attention.key, attention.value)),
        (ours.global_proj, (attention.query_global, attention.key_global, attention.value_global)),
    ):
        with torch.no_grad():
            projection.weight.copy_(torch.cat([part.weight for part in parts]))
            projection.bias.copy_(torch.cat([part.bias for part in parts]))
    nn.init.eye_(ours.out_proj.weight)
    nn.init.zeros_(ours.out_proj.bias)
    return ours, theirs


def marks(which):
    """Global tokens and padding of two rows of 24."""
    is_global, padding = torch.zeros(2, 24, dtype=torch.bool), torch.zeros(2, 24, dtype=torch.bool)
    if which in ("global", "all"):
        is_global[0, [0, 5, 23]] = True
        is_global[1, 2] = True
    if which in ("padding", "all"):
        padding[1, 17:] = True
    if which == "everywhere global":
        is_global[:] = True
    return is_global, padding


@pytest.mark.parametrize("which", ["local", "global", "padding", "all", "everywhere global"])
def test_hugging_face(which):
    ours, theirs = both(window=8)
    is_global, padding = marks(which)
    x = torch.randn(2, 24, 16, requires_grad=True)
    found = ours(x, key_padding_mask=padding, global_mask=is_global)[~padding]
    expected = theirs(x, is_global, padding)[~padding]
    assert_agree(found, expected, f"longformer, {which}", tolerance=1e-6, library=HUGGING_FACE)
    ours_parameters = [ours.qkv_proj.weight] + [ours.global_proj.weight] * bool(is_global.any())
    ours_x, *ours_weights = gradients(found, [x, *ours_parameters])
    attention = theirs.attention
    parts = [attention.query, attention.key, attention.value]
    if is_global.any():
        parts += [attention.query_global, attention.key_global, attention.value_global]
    theirs_x, *theirs_weights = gradients(expected, [x, *(part.weight for part in parts)])
    assert_agree(
        ours_x, theirs_x, f"longformer, {which}: gradient of x", tolerance=1e-6, library=HUGGING_FACE
    )
    assert_agree(
        torch.cat(ours_weights), torch.cat(theirs_weights), "gradient of the projections", tolerance=1e-6
    )


@pytest.mark.parametrize("which", ["global", "padding"])
def test_their_gradient_in_fp64_is_nan_beside_ours(which):
    """Theirs masks with the lowest number of fp64 and then computes the softmax in fp32."""
    ours, theirs = (module.double() for module in both(window=8))
    is_global, padding = marks(which)
    x = torch.randn(2, 24, 16, dtype=torch.float64, requires_grad=True)
    found = ours(x, key_padding_mask=padding, global_mask=is_global)[~padding]
    expected = theirs(x, is_global, padding)[~padding]
    assert_agree(found, expected, f"longformer, {which}", tolerance=1e-6)
    assert gradients(found, [x])[0].isfinite().all()
    assert gradients(expected, [x])[0].isnan().any()


def test_theirs_wants_a_multiple_of_its_window():
    ours, theirs = both(window=8)
    x = torch.randn(1, 23, 16)
    nothing = torch.zeros(1, 23, dtype=torch.bool)
    with pytest.raises(AssertionError, match="multiple of"):
        theirs(x, nothing, nothing)
    whole = torch.nn.functional.pad(x, (0, 0, 0, 1))
    nothing, padding = torch.zeros(1, 24, dtype=torch.bool), torch.arange(24)[None] == 23
    expected = theirs(whole, nothing, padding)[:, :23]
    assert_agree(ours(x, global_mask=nothing[:, :23]), expected, "longformer, 23 tokens", tolerance=1e-6)
