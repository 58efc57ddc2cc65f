"""What is specific to BigBird: its pattern, what it draws, and where it is exact."""

import pytest
import torch
from contract_parts import in_two_parts
from counted import assert_same, counted_attention, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from unrolled.attention.base import Heads, Masks
from unrolled.attention.bigbird import BigBirdAttention, Layout, bigbird_attention, draw_blocks
from unrolled.contract import UnsupportedError
from unrolled.ops.softmax import softmax_attention
from unrolled.testing import Maker


@pytest.mark.parametrize(
    "options",
    [{"block_size": 4}, {"block_size": 3, "global_tokens": 3, "global_blocks": (0, 1), "random_blocks": 2}],
    ids=["ITC", "ETC"],
)
@in_two_parts
def test_it_keeps_the_contract_in_small_blocks(options, check_part):
    check_part(Maker(BigBirdAttention, options))


layouts = st.builds(
    Layout,
    block_size=st.integers(1, 4),
    window_blocks=st.sampled_from([1, 3, 5]),
    global_blocks=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    global_tokens=st.integers(0, 3),
    random_blocks=st.integers(0, 4),
)


def module_of(layout, n_heads=4, **options):
    return BigBirdAttention(4 * n_heads, n_heads, **vars(layout), **options).double()


@settings(max_examples=60)
@given(layout=layouts, length=st.integers(0, 40), grouped=st.booleans(), seed=st.integers(0, 9))
def test_equals_the_definition(layout, length, grouped, seed):
    module = module_of(layout, n_kv_heads=2 if grouped else 4, value_dim=3, seed=seed)
    x = draw(2, length, 16)
    q, k, v = module.project(x)
    expected, _ = counted_attention(q, k, v, module.pattern(length)) if length else (q[..., :3], None)
    assert_same([module.attend(Heads(q, k, v), Masks())], [expected], [x])


@settings(max_examples=40)
@given(layout=layouts, seed=st.integers(0, 99))
def test_each_row_has_the_pattern_of_its_own_length(layout, seed):
    padding = torch.rand(3, 30, generator=torch.Generator().manual_seed(seed)) < torch.tensor(
        [[0.1], [0.4], [0.9]]
    )
    module = module_of(layout, seed=seed)
    x = draw(3, 30, 16)
    q, k, v = module.project(x)
    found = module.attend(Heads(q, k, v), Masks(key_padding_mask=padding))
    for row, keep in enumerate(~padding):
        if keep.any():
            heads = (y[row : row + 1, keep] for y in (q, k, v))
            expected, _ = counted_attention(*heads, module.pattern(int(keep.sum())))
            assert_same([found[row : row + 1, keep]], [expected], [x])


@settings(max_examples=40)
@given(layout=layouts, length=st.integers(1, 40), seed=st.integers(0, 9))
def test_the_pattern_is_what_the_paper_describes(layout, length, seed):
    b, radius, g, r = layout.block_size, layout.window_blocks // 2, layout.global_tokens, layout.random_blocks
    f, e = layout.global_blocks
    pattern = module_of(layout, n_heads=2, seed=seed).pattern(length)
    assert set(pattern.unique().tolist()) <= {0, 1}
    assert pattern[:, :g].all()
    assert pattern[:, :, :g].all()
    N = -(-max(0, length - g) // b)
    blocks = pattern[:, g::b, g::b]  # by their first tokens
    assert torch.equal(
        blocks.repeat_interleave(b, 1).repeat_interleave(b, 2)[:, : length - g, : length - g],
        pattern[:, g:, g:],
    )
    for head in range(2):
        for i in range(N):
            reads = set(blocks[head, i].nonzero().flatten().tolist())
            if i < f or i >= N - e:
                assert reads == set(range(N))
                continue
            otherwise = {j for j in range(N) if abs(i - j) <= radius or j < f or j >= N - e}
            assert reads >= otherwise
            assert len(reads - otherwise) == min(r, N - len(otherwise))


def test_random_blocks_are_drawn_evenly_and_independently():
    layout, n_heads, N = Layout(random_blocks=2), 5000, 12
    drawn = draw_blocks(layout, torch.tensor(7), n_heads, torch.tensor([N]), N)[0]
    for i in (1, 5, 10):
        others = [j for j in range(1, N - 1) if abs(i - j) > 1]
        hits = torch.stack([(drawn[:, i] == j).any(-1) for j in range(N)], -1).double()
        assert not hits[:, [j for j in range(N) if j not in others]].any()
        share = 2 / len(others)
        deviation = (share * (1 - share) / n_heads) ** 0.5
        assert (hits.mean(0)[others] - share).abs().max() < 5 * deviation
    same = (
        (drawn[:, 4, 0] == drawn[:, 8, 0]).double().mean()
    )  # of two rows, of which 6 and 6 of 10 may be read
    assert same < 0.3


def test_what_is_drawn_depends_on_seed_head_and_block_only():
    layout = Layout(block_size=2)
    x = torch.randn(1, 64, 16)
    one, again, other = (BigBirdAttention(16, 4, **vars(layout), seed=seed) for seed in (1, 1, 2**40 + 1))
    assert torch.equal(one.pattern(64), again.pattern(64))
    assert not torch.equal(one.pattern(64), other.pattern(64))
    assert not torch.equal(one.pattern(64)[0], one.pattern(64)[1])
    y = one.train()(x)
    assert torch.equal(one.eval()(x), y)
    one(x[:, :63])  # another length in between
    assert torch.equal(one(x), y)
    before = one.pattern(64)
    one.redraw()
    again.redraw()
    assert not torch.equal(one.pattern(64), before)
    assert torch.equal(one.pattern(64), again.pattern(64))
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x), one(x))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, window_blocks=19, global_blocks=(0, 0), random_blocks=0),
        Layout(4, window_blocks=1, global_blocks=(10, 0), random_blocks=0),
        Layout(4, window_blocks=1, global_blocks=(3, 7), random_blocks=0),
        Layout(4, window_blocks=1, global_blocks=(0, 0), random_blocks=9),
        Layout(4, window_blocks=3, global_blocks=(2, 1), random_blocks=5),
        Layout(4, window_blocks=1, global_blocks=(0, 0), global_tokens=40, random_blocks=0),
    ],
)
@pytest.mark.parametrize("length", [37, 40])
def test_where_everything_is_covered_it_is_softmax_attention(layout, length):
    assert layout.reads_all(length)
    q, k, v = (draw(2, length, 2, 3, seed=i) for i in range(3))
    n_blocks = layout.count_blocks(torch.tensor([length]))
    drawn = draw_blocks(layout, torch.tensor(0), 2, n_blocks, int(n_blocks))
    assert_same([bigbird_attention(q, k, v, layout, drawn)], [softmax_attention(q, k, v)], [q, k, v])
    module = module_of(layout, n_heads=2)
    assert module.pattern(length).all()


def test_the_first_length_that_is_not_covered_is_not_computed_as_softmax_attention():
    layout = Layout(4)
    assert layout.reads_all(28)
    assert not layout.reads_all(29)
    module = module_of(layout)
    assert module.pattern(28).all()
    assert not module.pattern(29).all()


def test_a_block_that_is_drawn_although_it_is_read_anyway_counts_once():
    layout = Layout(2, random_blocks=4)
    q, k, v = (draw(1, 20, 1, 3, seed=i) for i in range(3))
    row = torch.tensor([[0, 9, 5, 5]]).expand(10, 4)  # both global ones, and one twice
    found = bigbird_attention(q, k, v, layout, row.reshape(1, 1, 10, 4))
    alone = torch.tensor([5]).expand(1, 1, 10, 1)
    assert_same([found], [bigbird_attention(q, k, v, layout, alone)], [q, k, v])


def test_cost_is_linear_in_the_length():
    def flops(length):
        module = BigBirdAttention(16, 4, block_size=8)
        q = torch.randn(1, length, 4, 4, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            module.attend(Heads(q, q, q), Masks()).sum().backward()
        return counter.get_total_flops()

    assert flops(1024) == pytest.approx(2 * flops(512), rel=0.05)
    assert flops(2048) == pytest.approx(4 * flops(512), rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0, but must be at least 1"),
        ({"window_blocks": 2}, "window_blocks is 2, but must be odd"),
        ({"window_blocks": -1}, "window_blocks is -1, but must be odd"),
        ({"global_blocks": (1, -1)}, r"global_blocks is \(1, -1\), but must be \(first, last\)"),
        ({"global_blocks": (1,)}, r"global_blocks is \(1,\), but must be \(first, last\)"),
        ({"global_tokens": -1}, "global_tokens is -1, but must be at least 0"),
        ({"random_blocks": -1}, "random_blocks is -1, but must be at least 0"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"global_blocks": 1}, r"global_blocks is 1, but must be \(first, last\)"),
        ({"global_blocks": (1, 0.5)}, r"global_blocks is \(1, 0.5\), but must be \(first, last\)"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        BigBirdAttention(16, 4, **options)


def test_wrong_input():
    q = torch.randn(1, 20, 2, 3)
    with pytest.raises(
        ValueError, match=r"drawn is torch.int64 of shape \[1, 2, 9, 3\], but must be .*\[1, 2, 10, r\]"
    ):
        bigbird_attention(q, q, q, Layout(2), torch.zeros(1, 2, 9, 3).long())
    with pytest.raises(ValueError, match="k has length 19, but must have 20 like q"):
        bigbird_attention(q, q[:, 1:], q[:, 1:], Layout(2), torch.zeros(1, 2, 10, 3).long())
    with pytest.raises(
        UnsupportedError, match=r"global tokens read past and future .* use sparse_transformer"
    ):
        BigBirdAttention(16, 4, causal=True)
