"""What is specific to window attention: its windows, dilations, and the window that slides."""

import re

import pytest
import torch
from agreement import assert_same, normal
from contract_parts import check_uncompiled
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.attention.softmax import SoftmaxAttention
from unrolled.attention.window import WindowAttention
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.state import nbytes
from unrolled.ops.window.dilated import dilated_window_attention
from unrolled.testing import Maker


def module(n_heads=4, seed=0, **options):
    torch.manual_seed(seed)
    return WindowAttention(4 * n_heads, n_heads, **options).double()


def read(i, j, left, right, d):
    return (j - i) % d == 0 and -left * d <= j - i <= right * d


def defined(q, k, v, window_size, dilation):
    """The definition: for each query, the softmax of the scores of the keys in its window."""
    (B, T, H, D), P = q.shape, q.shape[2] // k.shape[2]
    rows = []
    for b in range(B):
        for h in range(H):
            for i in range(T):
                keys = [j for j in range(T) if read(i, j, *window_size, dilation[h])]
                scores = k[b, keys, h // P] @ q[b, i, h] / D**0.5
                rows.append(scores.softmax(0) @ v[b, keys, h // P])
    return torch.stack(rows).reshape(B, H, T, -1).transpose(1, 2)


@settings(max_examples=40)
@given(
    length=st.integers(1, 13),
    window_size=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    dilation=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    G=st.sampled_from([1, 2, 4]),
)
def test_it_is_what_its_definition_says(length, window_size, dilation, G):
    shapes = (2, length, 4, 2), (2, length, G, 2), (2, length, G, 3)
    xs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    expected = defined(*xs, window_size, dilation)
    found, _ = dilated_window_attention(*xs, window_size=window_size, dilation=dilation)
    assert_same(found, expected, xs, rtol=1e-12, atol=1e-12)


def test_its_pattern_is_the_definition():
    window = module(window=(2, 1), dilation=[1, 2, 2, 5])
    expected = [[[int(read(i, j, 2, 1, d)) for j in range(9)] for i in range(9)] for d in window.dilation]
    assert window.pattern(9).tolist() == expected


@pytest.mark.parametrize(
    ("options", "window_size"),
    [
        ({"causal": True, "window": 4}, (3, 0)),
        ({"causal": True, "window": 1}, (0, 0)),
        ({"causal": True, "window": (4, 0)}, (4, 0)),
        ({"window": 4}, (2, 2)),
        ({"window": 0}, (0, 0)),
        ({"window": [3, 1]}, (3, 1)),
    ],
)
def test_how_a_window_is_counted(options, window_size):
    assert module(**options).window_size == window_size


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_a_window_over_all_is_softmax_attention(causal, rotary):
    shared = {"causal": causal, "rotary": rotary, "n_kv_heads": 2}
    window = module(window=(10, 0 if causal else 10), **shared)
    softmax = SoftmaxAttention(16, 4, **shared).double()
    softmax.load_state_dict(window.state_dict())
    x = normal(2, 11, 16).requires_grad_()
    assert_same(window(x), softmax(x), [x], rtol=1e-12, atol=1e-12)


def test_a_wide_dilated_window_is_softmax_attention_of_each_residue_class():
    window, softmax = module(window=8, dilation=3), SoftmaxAttention(16, 4).double()
    softmax.load_state_dict(window.state_dict())
    x = normal(2, 11, 16)
    for i in range(3):
        torch.testing.assert_close(window(x)[:, i::3], softmax(x[:, i::3]), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"window": 4, "dilation": [1, 3, 3, 2]}, {"window": (3, 0), "dilation": [2, 1, 2, 1]}]
)
def test_it_keeps_the_contract_with_windows_shorter_than_sequences(options):
    check_uncompiled(Maker(WindowAttention, options))


@pytest.mark.compilers
def test_it_compiles_with_gaps():
    window, x = module(window=4, dilation=[1, 3, 3, 2]), normal(2, 11, 16)
    compiled = torch.compile(window, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), window(x))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dilation", [1, [1, 4, 2, 2]])
def test_gaps_of_padding_do_not_widen_a_window(causal, dilation):
    window = module(causal=causal, window=4, dilation=dilation)
    x = normal(1, 9, 16)
    places = [0, 1, 4, 5, 6, 9, 10, 12, 13]
    padded, padding = 1e3 * normal(1, 14, 16, seed=1), torch.ones(1, 14, dtype=torch.bool)
    padded[:, places], padding[:, places] = x, False
    torch.testing.assert_close(window(padded, key_padding_mask=padding)[:, places], window(x))


def test_the_way_back_from_valid_tokens_first():
    padding = torch.tensor([[True, False, True, False], [False, False, False, True]])
    x = torch.arange(8.0).reshape(2, 4, 1)
    (first,), behind, back = valid_tokens_first(padding, x)
    assert first.flatten().tolist() == [1, 3, 0, 0, 4, 5, 6, 0]
    assert behind.tolist() == [[False, False, True, True], [False, False, False, True]]
    torch.testing.assert_close(back(first), x.masked_fill(padding.unsqueeze(-1), 0))


def test_the_state_holds_the_reach_of_the_window_and_not_the_prompt():
    window = module(causal=True, window=(3, 0), dilation=[1, 2, 2, 5])
    state = window.init_state(2)
    assert state.k.shape == (2, 4, 15, 4)
    _, after = window.prefill(normal(2, 500, 16), state)
    assert nbytes(after) == nbytes(state)
    assert after.k.untyped_storage().nbytes() == nbytes((after.k,))


def decoder(**per_layer):
    torch.manual_seed(0)
    sizes = {"vocab_size": 5, "d_model": 8, "n_heads": 2, "n_layers": 3}
    options = {"attention": "window", "positions": "none", "layer_options": {"window": per_layer}}
    return Decoder(DecoderConfig(**sizes, **options)).double().eval()


def test_what_is_beyond_the_windows_of_all_layers_is_forgotten():
    model = decoder(window=[2, 3, 3], dilation=[1, 1, [1, 4]])
    reach = 1 + 2 + 2 * 4
    tokens = torch.randint(5, (1, 30), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, 10] = (tokens[:, 10] + 1) % 5
    changed = (model(tokens) != model(other)).any(-1)[0].nonzero().flatten()
    assert (int(changed.min()), int(changed.max())) == (10, 10 + reach)


def test_windows_that_grow_with_depth_step_as_they_train():
    model = decoder(window=[2, 4, 8])
    tokens = torch.randint(5, (2, 21), generator=torch.Generator().manual_seed(1))
    first, state = model.prefill(tokens[:, :13], model.init_state(2))
    outputs = list(first.unbind(1))
    for token in tokens[:, 13:].unbind(1):
        logits, state = model.step(token, state)
        outputs.append(logits)
    torch.testing.assert_close(torch.stack(outputs, 1), model(tokens), rtol=1e-12, atol=1e-12)
    assert [layer.k.shape[2] for layer in state.layers] == [1, 3, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5}, "window is 5, but must be even and not negative, half of it on each side"),
        ({"window": -2}, "window is -2, but must be even and not negative"),
        ({"window": 0, "causal": True}, "window is 0, but must be at least 1, the token itself"),
        ({"window": (2, 1), "causal": True}, "window is (2, 1), but a causal one must be (left, 0)"),
        ({"window": (-1, 0)}, "window is (-1, 0), but must be one number or (left, right)"),
        ({"window": (1, 2, 3)}, "window is (1, 2, 3), but must be one number or (left, right)"),
        ({"window": 2.0}, "window is 2.0, but must be one number or (left, right)"),
        ({"window": True}, "window is True, but must be one number or (left, right)"),
        ({"window": (True, 1)}, "window is (True, 1), but must be one number or (left, right)"),
        ({"window": "4"}, "window is '4', but must be one number or (left, right)"),
        ({"dilation": 2.5}, "dilation is 2.5, but must be an integer, or one for each head"),
        ({"dilation": True}, "dilation is True, but must be an integer, or one for each head"),
        ({"dilation": None}, "dilation is None, but must be an integer, or one for each head"),
        ({"dilation": [1, 2, 1, 2.0]}, "dilation is [1, 2, 1, 2.0], but must be an integer, or one"),
        ({"dilation": 0}, "dilation is 0, but must be at least 1"),
        ({"dilation": [1, 2, 0, 1]}, "dilation is [1, 2, 0, 1], but must be at least 1"),
        ({"dilation": [1, 2]}, "dilation has 2 values, but must have n_heads = 4"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        module(**options)


def test_padding_in_a_pack_is_refused():
    with pytest.raises(ValueError, match="packed sequences have no padding"):
        module()(
            normal(1, 4, 16),
            cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
            key_padding_mask=torch.zeros(1, 4, dtype=torch.bool),
        )
