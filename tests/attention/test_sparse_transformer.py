"""What is specific to the Sparse Transformer: its patterns, two hops, and the keys that a state keeps."""

import pytest
import torch
from counted import assert_same, counted_attention, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from unrolled.attention.sparse_transformer import SparseTransformerAttention
from unrolled.attention.sparse_transformer.factorized import Layout, factorized_attention, factorized_pattern
from unrolled.ops.softmax import softmax_attention
from unrolled.ops.state import nbytes
from unrolled.testing import (
    Maker,
    check_forms_agree,
    check_gradients_through_state,
    check_no_future_leak,
    check_padding,
    check_state_round_trip,
)


@st.composite
def layouts(draw, causal=None):
    kind = draw(st.sampled_from(["strided", "fixed"]))
    summary, parts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride = draw(st.integers(1, 7)) if kind == "strided" else summary * parts
    return Layout(
        causal=draw(st.booleans()) if causal is None else causal,
        n_heads=draw(st.sampled_from([2, 4])),
        kind=kind,
        stride=stride,
        window=stride - 1 + draw(st.integers(0, 9)),
        summary=summary,
        subblocks=draw(st.integers(1, parts)),
        reads=draw(st.sampled_from(["merged", "split", "near", "far"])),
    )


def definition(layout, length):
    """The table of the documentation, one pair after the other."""
    counts = torch.zeros(layout.n_heads, length, length, dtype=torch.int64)
    stride, half = layout.stride, (layout.n_heads + 1) // 2
    for h in range(layout.n_heads):
        reads = layout.reads if layout.reads != "split" else "near" if h < half else "far"
        last = stride - h % layout.subblocks * layout.summary
        for i in range(length):
            for j in range(i + 1 if layout.causal else length):
                if layout.kind == "strided":
                    near, far = abs(i - j) <= layout.window, (i - j) % stride == 0
                else:
                    near = i // stride == j // stride
                    far = last - layout.summary <= j % stride < last or i == j
                counts[h, i, j] = (near and reads != "far") or (far and reads != "near")
    return counts


@settings(max_examples=80)
@given(layout=layouts(), length=st.integers(0, 30), grouped=st.booleans(), padded=st.booleans())
def test_equals_the_definition(layout, length, grouped, padded):
    H, B = layout.n_heads, 2
    G = H // 2 if grouped else H
    q, k, v = draw(B, length, H, 3), draw(B, length, G, 3, seed=1), draw(B, length, G, 2, seed=2)
    expected = definition(layout, length)
    assert torch.equal(factorized_pattern(layout, length), expected > 0)
    if not padded or length == 0:
        found = factorized_attention(q, k, v, layout)
        assert_same([found], [counted_attention(q, k, v, expected)[0] if length else found], [q, k, v])
        return
    padding = torch.rand(B, length, generator=torch.Generator().manual_seed(length)) < 0.3
    found = factorized_attention(q, k, v, layout, key_padding_mask=padding)
    for row, keep in enumerate(~padding):
        n = int(keep.sum())
        if n:
            heads = (x[row : row + 1, keep] for x in (q, k, v))
            o, _ = counted_attention(*heads, expected[:, :n, :n])
            assert_same([found[row : row + 1, keep]], [o], [q, k, v])


@pytest.mark.parametrize(
    ("options", "places"),
    [({}, range(96, 128)), ({"stride": 8}, (6, 7)), ({"stride": 12}, (9, 10, 11)), ({"stride": 6}, range(6))],
    ids=str,
)
def test_by_default_blocks_are_summarised_by_their_last_quarter(options, places):
    stride = options.get("stride", 128)
    found = SparseTransformerAttention(8, 2, causal=True, **options).pattern(300)
    for i in (0, 5, 130, 257, 299):
        expected = [j <= i and (j // stride == i // stride or j % stride in places) for j in range(300)]
        assert found[:, i].tolist() == [expected] * 2


def test_by_default_the_strided_kind_reads_as_many_tokens_before_as_its_stride():
    options = {"kind": "strided", "stride": 7}
    near = SparseTransformerAttention(8, 2, causal=True, **options, reads="near").pattern(30)
    assert near[:, 29].nonzero()[:, 1].tolist() == [22, 23, 24, 25, 26, 27, 28, 29] * 2
    both = SparseTransformerAttention(8, 2, causal=True, **options).pattern(30)
    assert both[:, 29].nonzero()[:, 1].tolist() == [1, 8, 15, 22, 23, 24, 25, 26, 27, 28, 29] * 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "strided", "window": 4},
        {"kind": "strided", "window": 3},
        {"kind": "fixed", "summary": 1},
        {"kind": "fixed", "summary": 2, "subblocks": 2},
        {"kind": "fixed", "summary": 4},
    ],
)
def test_two_hops_reach_everything(options, causal):
    layouts = (Layout(causal, 2, stride=4, reads=reads, **options) for reads in ("near", "far"))
    near, far = (factorized_pattern(layout, 23).any(0).long() for layout in layouts)  # by any head
    everything = torch.ones(23, 23, dtype=torch.bool)
    everything = everything.tril() if causal else everything
    if options["kind"] == "strided":
        assert torch.equal(far @ near > 0, everything)
    elif causal:
        assert torch.equal((far @ near > 0) | (near > 0), everything)
    else:  # the last block may be too short to have a summary
        assert torch.equal(((far @ near > 0) | (near > 0))[..., :20], everything[..., :20])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "strided", "stride": 40, "window": 40},
        {"kind": "strided", "stride": 7, "window": 36},
        {"kind": "strided", "stride": 1, "window": 0},
        {"kind": "strided", "stride": 1, "window": 0, "reads": "far"},
        {"kind": "fixed", "stride": 40, "summary": 8},
        {"kind": "fixed", "stride": 1, "summary": 1},
        {"kind": "fixed", "stride": 8, "summary": 8},
        {"kind": "fixed", "stride": 8, "summary": 8, "reads": "far"},
    ],
)
def test_where_both_sets_hold_everything_it_is_softmax_attention(options, causal):
    q, k, v = (draw(2, 37, 4, 3, seed=i) for i in range(3))
    found = factorized_attention(q, k, v, Layout(causal, 4, **options))
    assert_same([found], [softmax_attention(q, k, v, causal=causal)], [q, k, v])


OPTIONS = [
    {"stride": 4, "summary": 2, "subblocks": 2},
    {"kind": "strided", "stride": 5},
    {"kind": "strided", "stride": 3, "window": 7, "reads": "far"},
    {"stride": 6, "summary": 2, "subblocks": 3, "reads": "split"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("check", [check_no_future_leak, check_padding, check_gradients_through_state])
def test_it_keeps_the_contract_at_short_strides(options, check):
    check(Maker(SparseTransformerAttention, options), SparseTransformerAttention.supports)


@pytest.mark.parametrize("check", [check_forms_agree, check_state_round_trip])
def test_it_keeps_the_contract_with_split_heads(check):
    check(Maker(SparseTransformerAttention, OPTIONS[-1]), SparseTransformerAttention.supports)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_of_a_batch_may_be_at_different_positions(options):
    module = SparseTransformerAttention(8, 4, causal=True, **options).double()
    lengths, x = (70, 3, 0), draw(3, 220, 8).detach()
    padding = torch.arange(70) >= torch.tensor(lengths).unsqueeze(1)
    y, state = module.prefill(x[:, :70], module.init_state(3), key_padding_mask=padding)
    outputs = []
    for t in range(70, 220):  # across several blocks, and past what stays recent
        y_t, state = module.step(x[:, t], state)
        outputs.append(y_t)
    for row, n in enumerate(lengths):
        expected = module(torch.cat([x[row : row + 1, :n], x[row : row + 1, 70:]], 1))
        torch.testing.assert_close(y[row, :n], expected[0, :n], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.stack(outputs, 1)[row], expected[0, n:], rtol=1e-12, atol=1e-12)
    assert state.position.tolist() == [n + 150 for n in lengths]


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({"stride": 16, "summary": 2}, 16 + 20 * 2),
        ({"stride": 16, "summary": 2, "subblocks": 3}, 16 + 20 * 6),
        ({"kind": "strided", "stride": 16}, 20 * 16),
    ],
)
def test_the_state_keeps_what_is_still_to_be_read(options, slots):
    module = SparseTransformerAttention(8, 2, causal=True, **options)
    x = torch.randn(1, 321, 8)
    with torch.no_grad():
        _, state = module.prefill(x, module.init_state(1))
        stepped = module.init_state(1)
        for x_t in x.unbind(1):
            _, stepped = module.step(x_t, stepped)
    assert state.past_k.shape[1] == slots
    assert state.recent_k.shape[1] == 1
    assert nbytes(stepped) == nbytes(state)


@pytest.mark.parametrize("kind", ["fixed", "strided"])
def test_tokens_read_with_a_mask_take_no_more_slots(kind):
    module = SparseTransformerAttention(8, 2, causal=True, kind=kind, stride=16).double()
    x, found = torch.randn(1, 40, 8, dtype=torch.float64), []
    expected = module(x)
    for masked in (False, True):
        state, outputs = module.init_state(1), []
        for x_t in x.split(1, 1):
            mask = torch.zeros(1, 1, dtype=torch.bool) if masked else None
            y, state = module.prefill(x_t, state, key_padding_mask=mask)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-12, atol=1e-12)
        found.append(state.past_k.shape[1] + state.recent_k.shape[1])
    assert found[1] <= found[0] + 16


def test_a_step_gathers_the_keys_that_it_reads():
    def flops(length):
        module = SparseTransformerAttention(8, 2, causal=True, kind="strided", stride=32)
        with torch.no_grad():
            _, state = module.prefill(torch.randn(1, length, 8), module.init_state(1))
            with FlopCounterMode(display=False) as counter:
                module.step(torch.randn(1, 8), state)
        return counter.get_total_flops()

    more = flops(2048) - flops(1024)
    assert 0 < more <= 2 * 2 * 8 * (1024 // 32)  # scores and values: one key in 32 of those that came


def test_cost_grows_as_the_pairs_that_are_read():
    def flops(length, stride):
        q = torch.randn(1, length, 2, 4)
        with FlopCounterMode(display=False) as counter:
            factorized_attention(q, q, q, Layout(True, 2, stride=stride, summary=4, reads="far"))
        return counter.get_total_flops()

    # n sqrt(n) for a stride of sqrt(n), if the products that the mask throws away stay in proportion
    assert flops(4096, 64) < 1.1 * 8 * flops(1024, 32)
    pairs = factorized_pattern(Layout(True, 2, stride=32, summary=4, reads="far"), 1024).sum()
    assert flops(1024, 32) < 1.6 * 4 * 4 * pairs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"reads": "far"}, {"kind": "strided"}, {"kind": "strided", "reads": "far"}]
)
def test_a_stride_beyond_the_sequence_costs_nothing(options, causal):
    module = SparseTransformerAttention(8, 2, causal=causal, stride=2**40, **options)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(1, 16, 8))
    assert counter.get_total_flops() <= 2 * 16 * 8 * (4 * 8 + 2 * 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "random"}, "kind is 'random', but must be one of strided, fixed"),
        ({"reads": "both"}, "reads is 'both', but must be one of merged, split, near, far"),
        ({"stride": 0}, "stride is 0, but must be at least 1"),
        ({"kind": ["fixed"]}, r"kind is \['fixed'\], but must be one of strided, fixed"),
        ({"kind": "strided", "stride": 8, "window": 6}, "window is 6, but must be at least stride - 1 = 7"),
        (
            {"kind": "strided", "summary": 2},
            "summary is 2 and subblocks 1, but must be left out for the strided",
        ),
        ({"window": 3}, "window is 3, but must be None for fixed blocks, whose length is stride = 128"),
        ({"stride": 8, "summary": 3}, "summary is 3, but must divide stride = 8"),
        ({"stride": 8, "summary": 0}, "summary is 0, but must divide stride = 8"),
        ({"stride": 8, "summary": 4, "subblocks": 3}, "subblocks is 3, but must be between 1 and .* = 2"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        SparseTransformerAttention(16, 4, **options)


def test_wrong_input():
    module = SparseTransformerAttention(16, 4, causal=True)
    other = SparseTransformerAttention(16, 4, causal=True, value_dim=3).init_state(2)
    with pytest.raises(
        ValueError, match=r"state.past_v is .* \[2, 128, 4, 3\] on cpu, but must be .* \[2, 128, 4, 4\]"
    ):
        module.step(torch.randn(2, 16), other)
    q = torch.randn(1, 20, 2, 3)
    with pytest.raises(ValueError, match="k has length 19, but must have 20 like q"):
        factorized_attention(q, q[:, 1:], q[:, 1:], Layout(True, 2))


def test_one_head_cannot_be_split():
    with pytest.raises(ValueError, match="n_heads is 1, but must be at least 2 for reads = 'split'"):
        SparseTransformerAttention(16, 1, reads="split")


@pytest.mark.parametrize(
    ("made", "given", "length", "message"),
    [
        ({"stride": 8}, {"stride": 12}, 0, "state.past_k is .* must be .* P >= 12"),
        ({"stride": 8}, {"kind": "strided", "stride": 12}, 0, "state.past_k has 8 slots, but must have 0"),
        ({"kind": "strided", "stride": 8}, {"stride": 8}, 0, "state.past_k is .* must be .* P >= "),
        ({"stride": 8, "summary": 2}, {"stride": 8, "summary": 4}, 72, "state.past_k has 24 slots"),
        (
            {"kind": "strided", "stride": 8},
            {"kind": "strided", "stride": 12},
            64,
            "has 64 slots, but must have 0",
        ),
        ({"stride": 8, "summary": 2}, {"stride": 8, "summary": 2, "subblocks": 2}, 136, "has 40 slots"),
        (
            {"kind": "strided", "stride": 128},
            {"kind": "strided", "stride": 64},
            100,
            "state.recent_k has 100 tokens, but must have fewer than 64 for strided attention of stride = 64",
        ),
    ],
)
def test_a_state_of_other_options_is_refused(made, given, length, message):
    made, given = (SparseTransformerAttention(8, 2, causal=True, **options) for options in (made, given))
    _, state = made.prefill(torch.randn(1, length, 8), made.init_state(1))
    made.step(torch.randn(1, 8), state)
    with pytest.raises(ValueError, match=message):
        given.step(torch.randn(1, 8), state)
    with pytest.raises(ValueError, match=message):
        given.prefill(torch.randn(1, 3, 8), state)
