"""What is specific to long-short attention: one softmax over a window and landmarks."""

import pytest
import torch
from agreement import assert_same_gradients, normal
from contract_parts import in_two_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import layer_norm
from torch.utils.flop_counter import FlopCounterMode

from unrolled.attention.long_short import LongShortAttention
from unrolled.attention.long_short.parts import long_short_reference
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.state import nbytes
from unrolled.testing import Maker, check_forms_agree, check_padding, check_state_is_a_value


def make(d_model=8, n_heads=2, **options):
    """One whose norms and biases are not those that it begins with."""
    return Maker(LongShortAttention, options, d_model, n_heads)(causal=options.pop("causal", False))


def defined(module, x):
    """The definition, by heads and queries, of one sequence `x [T,d_model]` with as many key heads as heads."""
    T, H, D, r = len(x), module.n_heads, module.head_dim, module.rank
    q, k, v = module.qkv_proj(x).chunk(3, dim=-1)
    logits = module.pool_proj(x).reshape(T, H, r) if r else x.new_zeros(T, H, 0)

    def norm(y, layer):
        return layer_norm(y, y.shape[-1:], layer.weight, layer.bias) if layer else y

    def pooled(tokens, y):
        """P^T y of some of the tokens, `[r, H*D]`."""
        weights = logits[tokens].softmax(0)
        return torch.einsum("thr,thd->rhd", weights, y[tokens].reshape(-1, H, D)).reshape(r, H * D)

    near = [norm(y, module.window_norm) for y in (k, v)]
    rows = []
    for i in range(T):
        if module.causal:
            window = range(max(0, i - module.window + 1), i + 1)
            groups = [range(c - module.chunk, c) for c in range(module.chunk, i + 1, module.chunk)]
            sources = k, v
        else:
            begin = i // module.window * module.window if module.window else i
            beside = max(module.window // 2, 1) if module.window else 0
            window = range(max(0, begin - beside), min(T, begin + max(module.window, 1) + beside))
            groups, sources = [range(T)], near
        far_k, far_v = (
            torch.cat([y[:0], *(norm(pooled(list(g), y), module.landmark_norm) for g in groups if r)])
            for y in sources
        )
        read = torch.ones(1, len(far_k) + len(window), dtype=torch.bool)
        heads = []
        for head in (slice(h * D, (h + 1) * D) for h in range(H)):
            near_k, near_v = (z[list(window), head] for z in near)
            o = long_short_reference(q[i : i + 1, head], near_k, near_v, far_k[:, head], far_v[:, head], read)
            heads.append(o[0])
        rows.append(torch.cat(heads))
    return module.out_proj(torch.stack(rows))


@settings(max_examples=30)
@given(
    T=st.integers(1, 14),
    window=st.integers(0, 6),
    rank=st.integers(0, 3),
    dual_norm=st.booleans(),
    chunk=st.integers(1, 5),
    causal=st.booleans(),
    seed=st.integers(0, 9),
)
def test_it_is_one_softmax_over_window_and_landmarks(T, window, rank, dual_norm, chunk, causal, seed):
    window = max(window, chunk) if causal else window
    module = make(causal=causal, window=window, rank=rank, dual_norm=dual_norm, chunk=chunk)
    x = normal(2, T, 8, seed=seed).requires_grad_()
    found, expected = module(x), torch.stack([defined(module, row) for row in x])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert_same_gradients(found, expected, [x, *module.parameters()], rtol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_without_landmarks_a_window_that_reaches_everything_is_softmax_attention(causal, rotary):
    options = {"causal": causal, "rotary": rotary}
    module = LongShortAttention(8, 2, window=20, rank=0, dual_norm=False, **options).double()
    softmax = SoftmaxAttention(8, 2, **options).double()
    softmax.load_state_dict(module.state_dict())
    x, padding = normal(3, 20, 8), torch.arange(20) >= torch.tensor([[20], [11], [0]])
    found, expected = (m(x, key_padding_mask=padding) for m in (module, softmax))
    torch.testing.assert_close(found[~padding], expected[~padding])


def test_a_window_beyond_the_sequence_costs_nothing():
    module = LongShortAttention(8, 2, window=2**40, rank=0)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(1, 16, 8))
    assert counter.get_total_flops() <= 2 * 16 * 8 * (4 * 8 + 2 * 16)


def test_a_row_of_padding_reads_nothing_not_even_the_bias_of_a_norm():
    for options in ({"window": 4}, {"window": 4, "causal": True, "chunk": 2}):
        module = make(**options)
        x = normal(2, 9, 8).requires_grad_()
        padding = torch.tensor([[True] * 9, [False] * 9])
        y = module(x, key_padding_mask=padding)
        torch.testing.assert_close(y[0], module.out_proj.bias.expand(9, 8))
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert not gradient[0].any()
        assert gradient.isfinite().all()


def test_causal_chunks_are_counted_in_valid_tokens_through_prefills_and_steps():
    module = make(causal=True, window=4, chunk=3, rank=2)
    x = normal(2, 30, 8)
    padding = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    state = module.init_state(2)
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        _, state = module.prefill(x[:, begin:end], state, key_padding_mask=padding[:, begin:end])
    steps = []
    for t in range(20, 30):
        y, state = module.step(x[:, t], state)
        steps.append(y)
    found = torch.stack(steps, 1)
    for b in range(2):
        row = torch.cat([x[b, :20][~padding[b]], x[b, 20:]])
        torch.testing.assert_close(found[b], module(row[None])[0, -10:])
    assert state.position.tolist() == [30 - int(n) for n in padding.sum(1)]


def test_the_state_grows_by_the_landmarks_of_a_chunk():
    module = LongShortAttention(16, 2, causal=True, window=8, chunk=4).float()
    with torch.no_grad():
        sizes = []
        for n in (400, 800, 1200):
            state = module.prefill(torch.randn(1, n, 16), module.init_state(1))[1]
            sizes.append(nbytes(state))
            _, state = module.step(torch.randn(1, 16), state)
    per_landmark = 2 * 16 * 4  # a key and a value of all heads in fp32
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 100 * per_landmark


def test_rotary_queries_and_keys_meet_in_the_window_and_landmarks_have_no_position():
    module = make(causal=True, window=4, chunk=4, rank=1, rotary=True)
    x = normal(1, 9, 8)
    plain = make(causal=True, window=4, chunk=4, rank=1)
    plain.load_state_dict(module.state_dict())
    assert (module(x) - plain(x)).abs().max() > 1e-3
    torch.testing.assert_close(module(x)[:, 0], plain(x)[:, 0])  # the first token reads itself alone
    far = normal(1, 12, 8)
    other = far[:, [1, 0, *range(2, 12)]]  # in the chunk of the same landmark, and out of the last window
    torch.testing.assert_close(module(other)[:, 8:], module(far)[:, 8:])


@in_two_parts
def test_landmarks_alone_keep_the_contract(check_part):
    check_part(Maker(LongShortAttention, {"window": None, "rank": 3}))


def test_landmarks_alone_read_another_sequence():
    assert not LongShortAttention.supports.cross
    module = make(window=None, rank=3)
    x, memory = normal(2, 4, 8), normal(2, 9, 8, seed=1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x, memory[:, order]), module(x, memory))  # a set, not a sequence


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"window": 4, "chunk": 4},
        {"window": 5, "chunk": 3, "rank": 2, "dual_norm": False},
        {"window": 3, "chunk": 16, "rank": 0},
    ],
)
def test_small_windows_and_chunks_keep_the_contract(options):
    maker = Maker(LongShortAttention, options)
    for check in (check_forms_agree, check_padding, check_state_is_a_value):
        check(maker, LongShortAttention.supports)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window is -1, but must be at least 0"),
        ({"window": 8, "causal": True}, "window is 8, but must be at least chunk = 16"),
        ({"rank": -1}, "rank is -1, but must be at least 0"),
        ({"rank": 0, "window": None}, "rank is 0, but must be at least 1 without a window"),
        ({"chunk": 0}, "chunk is 0, but must be at least 1"),
        ({"value_dim": 6}, "value_dim is 6, but must be head_dim = 4 with dual_norm"),
        ({"window": None, "rotary": True}, "rotary is True, but must be False with window=None"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LongShortAttention(8, 2, **options)


def test_what_landmarks_alone_cannot_do_is_refused():
    with pytest.raises(UnsupportedError, match="not causal: it must have a window to be causal"):
        LongShortAttention(8, 2, window=None, causal=True)
    with pytest.raises(UnsupportedError, match="does not support cross-attention"):
        LongShortAttention(8, 2)(torch.zeros(1, 3, 8), torch.zeros(1, 4, 8))


def test_a_state_of_other_options_is_named():
    module = LongShortAttention(8, 2, causal=True, window=32)
    other = LongShortAttention(8, 2, causal=True, window=16)
    with pytest.raises(
        ValueError, match=r"state.window_k is .* \[1, 16, 2, 4\] .* must be .* \[1, 32, 2, 4\]"
    ):
        module.prefill(torch.zeros(1, 3, 8), other.init_state(1))


@pytest.mark.parametrize(
    ("made", "given", "message"),
    [
        ({"chunk": 8}, {"chunk": 16}, "state.chunk_k is .* must be .* l >= 16"),
        ({"chunk": 16}, {"chunk": 4}, "chunk_k has 16 tokens, but .* chunk = 4 and rank = 1 keeps 4 to 7"),
    ],
)
def test_a_state_of_other_chunks_is_refused(made, given, message):
    made, given = (LongShortAttention(8, 2, causal=True, window=32, **options) for options in (made, given))
    state = made.init_state(1)
    made.step(torch.zeros(1, 8), state)
    with pytest.raises(ValueError, match=message):
        given.step(torch.zeros(1, 8), state)
    with pytest.raises(ValueError, match=message):
        given.prefill(torch.zeros(1, 3, 8), state)


def test_without_landmarks_a_state_is_the_window():
    module = LongShortAttention(8, 2, causal=True, window=3, rank=0).double()
    state = module.init_state(2)
    size = nbytes(state)
    assert size == 2 * (3 * 2 * 8 * 8 + 8)  # rows, window, keys and values, width, bytes; position
    _, state = module.prefill(normal(2, 40, 8), state)
    _, state = module.step(normal(2, 8), state)
    assert nbytes(state) == size
    assert module.supports.recurrence == "constant"
    with pytest.raises(ValueError, match="window is 0, but must be at least 1"):
        LongShortAttention(8, 2, causal=True, window=0, rank=0)
