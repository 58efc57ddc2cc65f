"""What is specific to Longformer: its global tokens, their projections, their positions."""

import re

import pytest
import torch
from agreement import assert_same, normal
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import attention
from unrolled.attention.longformer import LongformerAttention, global_positions, longformer_reference
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.attention.window import WindowAttention
from unrolled.contract import UnsupportedError
from unrolled.models import Encoder, EncoderConfig
from unrolled.testing import Maker


def module(n_heads=4, seed=0, **options):
    torch.manual_seed(seed)
    made = LongformerAttention(4 * n_heads, n_heads, **options).double()
    if made.global_proj is not None:  # its own start is so small that it would hide what is wrong
        torch.nn.init.normal_(made.global_proj.weight, std=0.5)
        torch.nn.init.normal_(made.global_proj.bias, std=0.5)
    return made


def defined(longformer, x, is_global):
    """The definition, head by head and row by row."""
    left, right = longformer.window_size
    T, H, P = x.shape[1], longformer.n_heads, longformer.n_heads // longformer.n_kv_heads
    ahead = torch.arange(T) - torch.arange(T).unsqueeze(1)
    rows = []
    for row, is_global_row in zip(x, is_global, strict=True):
        heads = []
        for h in range(H):
            d = longformer.dilation[h]
            window = (ahead % d == 0) & (ahead >= -left * d) & (ahead <= right * d)
            projected = [
                tuple(
                    y.unflatten(-1, (-1, 4))[:, h if i == 0 else h // P]
                    for i, y in enumerate(proj(row).split(longformer.widths, -1))
                )
                for proj in (longformer.qkv_proj, longformer.global_proj)
            ]
            heads.append(longformer_reference(*projected, is_global_row, window))
        rows.append(torch.stack(heads, 1))
    return longformer.out_proj(torch.stack(rows).flatten(2))


@settings(max_examples=30)
@given(
    length=st.integers(1, 12),
    window=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dilation=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    G=st.sampled_from([2, 4]),
    seed=st.integers(0, 9),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_it_is_what_its_definition_says(length, window, dilation, G, seed, share):
    longformer = module(window=window, dilation=dilation, n_kv_heads=G)
    x = normal(2, length, 16, seed=seed).requires_grad_()
    is_global = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < share
    found = longformer(x, global_mask=is_global)
    assert_same(found, defined(longformer, x, is_global), [x, *longformer.parameters()])


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [
        (0, [[], []]),
        (2, [[0, 1], [0, 1]]),
        (9, [[0, 1, 2, 3, 4], [0, 1, 2]]),
        ([0, -1], [[0, 4], [0, 2]]),
        ([-1, 4, 4, -5], [[0, 4], [2]]),
        ([], [[], []]),
    ],
)
def test_fixed_positions_are_counted_in_each_row(chosen, rows):
    marks = global_positions(chosen, torch.tensor([5, 3]), 5)
    assert [row.nonzero().flatten().tolist() for row in marks] == rows
    longformer, x = module(window=2, global_tokens=chosen), normal(2, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    found = longformer(x, key_padding_mask=padding)
    expected = longformer(x, key_padding_mask=padding, global_mask=marks)
    torch.testing.assert_close(found[~padding], expected[~padding])


def test_its_pattern_is_the_definition():
    longformer = module(window=2, dilation=[1, 1, 2, 2], global_tokens=[0, -2])
    x = normal(1, 7, 16)
    counts = longformer.pattern(7)
    assert int(counts.max()) == 1
    x.requires_grad_()
    is_global = torch.tensor([[True, False, False, False, False, True, False]])
    for i in range(7):
        (gradient,) = torch.autograd.grad(longformer(x, global_mask=is_global)[0, i].sum(), x)
        assert (gradient[0].abs().sum(-1) > 0).tolist() == (counts.sum(0)[i] > 0).tolist()


def softmax_of(projection, longformer):
    softmax = SoftmaxAttention(16, 4, n_kv_heads=longformer.n_kv_heads, rotary=longformer.rotary).double()
    softmax.qkv_proj.load_state_dict(projection.state_dict())
    softmax.out_proj.load_state_dict(longformer.out_proj.state_dict())
    return softmax


@pytest.mark.parametrize("rotary", [True, False])
def test_where_it_equals_softmax_attention(rotary):
    x, everywhere = normal(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    wide = module(window=16, global_tokens=0, rotary=rotary)
    torch.testing.assert_close(wide(x), softmax_of(wide.qkv_proj, wide)(x))
    narrow = module(window=2, rotary=rotary, n_kv_heads=2)
    found = narrow(x, global_mask=everywhere)
    torch.testing.assert_close(found, softmax_of(narrow.global_proj, narrow)(x))
    assert (found - softmax_of(narrow.qkv_proj, narrow)(x)).abs().max() > 1e-2
    narrow.copy_local_to_global()
    torch.testing.assert_close(narrow(x, global_mask=everywhere), softmax_of(narrow.qkv_proj, narrow)(x))


def test_a_copy_of_a_dense_model_with_a_wide_window_is_that_model_whatever_is_global():
    longformer, x = module(window=(8, 8)), normal(2, 9, 16)
    longformer.copy_local_to_global()
    for n in (0, 1, 4):
        is_global = (torch.arange(9) < n).expand(2, 9)
        found = longformer(x, global_mask=is_global)
        torch.testing.assert_close(found, softmax_of(longformer.qkv_proj, longformer)(x))


def test_causal_it_is_window_attention():
    options = {"causal": True, "window": 4, "dilation": [1, 1, 2, 3], "rotary": True}
    longformer, window = module(**options), WindowAttention(16, 4, **options).double()
    window.load_state_dict(longformer.state_dict())
    x = normal(2, 11, 16)
    torch.testing.assert_close(longformer(x), window(x), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"window": 4, "dilation": [1, 3, 3, 2], "global_tokens": 2},
        {"window": (2, 0), "dilation": 2, "global_tokens": [0, -1]},
    ],
)
def test_it_keeps_the_contract_with_windows_shorter_than_sequences(options):
    """The default options, with global tokens too, are compiled with all mechanisms."""
    check_uncompiled(Maker(LongformerAttention, options))


@pytest.mark.parametrize("rotary", [True, False])
def test_ragged_global_tokens_among_padding(rotary):
    longformer, x = module(window=2, rotary=rotary), normal(3, 8, 16).requires_grad_()
    padding = torch.tensor([[0] * 8, [1, 1, 0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]]).bool()
    is_global = torch.tensor([[0, 1, 1, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0, 0], [0] * 8]).bool()
    found = longformer(x, key_padding_mask=padding, global_mask=is_global)[~padding]
    alone = [
        longformer(row[keep][None], global_mask=marks[keep][None])[0]
        for row, keep, marks in zip(x, ~padding, is_global, strict=True)
    ]
    assert_same(found, torch.cat(alone), [x, *longformer.parameters()])


def test_a_classifier_reads_the_whole_text_through_its_first_token():
    fields = {
        "d_model": 8,
        "n_heads": 2,
        "n_layers": 2,
        "n_classes": 2,
        "pooling": "first",
        "positions": "none",
    }
    tokens = torch.randint(7, (1, 40), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, -1] = (tokens[:, -1] + 1) % 7
    for global_tokens, differs in ((1, True), (0, False)):
        options = {"longformer": {"global_tokens": global_tokens}}
        per_layer = {"longformer": {"window": [2, 4]}}
        torch.manual_seed(0)
        config = EncoderConfig(
            7, attention="longformer", attention_options=options, layer_options=per_layer, **fields
        )
        model = Encoder(config).eval()
        assert bool((model(tokens) != model(other)).any()) == differs


@pytest.mark.parametrize("masks", ["none", "padding", "pack"])
def test_positions_that_a_sequence_lacks_are_left_out(masks):
    x, few = normal(1, 4, 16), module(window=2, global_tokens=[0, -1])
    many = module(window=2, global_tokens=[0, -1, 4, -5])
    of_forward = {
        "none": {},
        "padding": {"key_padding_mask": torch.zeros(1, 4, dtype=torch.bool)},
        "pack": {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)},
    }
    torch.testing.assert_close(many(x, **of_forward[masks]), few(x))
    assert torch.equal(many.pattern(4), few.pattern(4))


def test_what_cannot_be_is_refused():
    with pytest.raises(UnsupportedError, match="no global tokens where causal"):
        module(causal=True, global_tokens=1)
    causal, x = module(causal=True), normal(1, 4, 16)
    assert causal.global_proj is None
    with pytest.raises(UnsupportedError, match="does not support global_mask"):
        causal(x, global_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="no global projections"):
        causal.copy_local_to_global()
    for options, message in (
        ({"global_tokens": -1}, "global_tokens is -1, but must be a number of tokens or a list of positions"),
        ({"global_tokens": "first"}, "global_tokens is 'first', but must be"),
        ({"global_tokens": [0.5]}, "global_tokens is [0.5], but must be"),
        ({"global_tokens": 2.5}, "global_tokens is 2.5, but must be"),
        ({"global_tokens": 0.0}, "global_tokens is 0.0, but must be"),
        ({"global_tokens": True}, "global_tokens is True, but must be"),
        ({"global_tokens": ""}, "global_tokens is '', but must be"),
        ({"global_tokens": [0, 2**70]}, f"global_tokens is {2**70}, but must be below 2^63"),
        ({"dilation": 2**70}, f"dilation is {2**70}, but must be below 2^63"),
        ({"window": 2**70}, f"window is {2**70}, but must be below 2^63"),
        ({"dilation": 2.5}, "dilation is 2.5, but must be an integer"),
        ({"window": 3}, "window is 3, but must be even"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            module(**options)
    for wrong in (torch.ones(1, 4), torch.ones(1, 5, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
        with pytest.raises(ValueError, match="global_mask is"):
            module()(x, global_mask=wrong)


def test_sequences_of_a_pack_may_be_too_short_for_a_position():
    longformer, x = module(window=2, global_tokens=[0, 4]), normal(1, 12, 16)
    rows = torch.cat([torch.cat([x[:, :3], torch.zeros(1, 6, 16)], 1), x[:, 3:]])
    padded = longformer(rows, key_padding_mask=torch.arange(9) >= torch.tensor([[3], [9]]))
    packed = longformer(x, cu_seqlens=torch.tensor([0, 3, 12], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([padded[:1, :3], padded[1:]], 1))


@pytest.mark.parametrize("rotary", [False, True])
def test_sequences_of_a_pack_have_global_tokens_of_their_own(rotary):
    module = LongformerAttention(8, 2, window=2, rotary=rotary).double()
    x = torch.randn(1, 24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = [9, 1, 0, 14]
    offsets = torch.tensor([0, 9, 10, 10, 24], dtype=torch.int32)
    chosen = torch.zeros(1, 24, dtype=torch.bool)
    chosen[0, [0, 5, 20]] = True
    for global_mask in (None, chosen):
        parts = zip(x.split(lengths, 1), chosen.split(lengths, 1), strict=True)
        separate = [module(y, global_mask=None if global_mask is None else mask) for y, mask in parts]
        packed = module(x, cu_seqlens=offsets, global_mask=global_mask)
        torch.testing.assert_close(packed, torch.cat(separate, 1))


def test_global_projections_start_like_those_of_a_model():
    torch.manual_seed(0)
    layer = attention.load("longformer")(64, 4)
    assert layer.global_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not layer.global_proj.bias.any()
