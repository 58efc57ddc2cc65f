"""Packed sequences, positions and masks."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unrolled.ops.delta import delta_rule
from unrolled.ops.dplr import dplr
from unrolled.ops.gla import diagonal_linear_attention
from unrolled.ops.linear import linear_attention
from unrolled.ops.masks import causal_mask, packed_mask, padding_mask
from unrolled.ops.packing import (
    length_buckets,
    pack,
    pack_padded,
    pad_packed,
    put_tokens,
    unpack,
    valid_tokens_first,
)
from unrolled.ops.positions import positions_from_cu_seqlens, positions_from_padding, rotary, sinusoidal

lengths_lists = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(lengths_lists)
def test_pack_and_pad_lose_nothing(lengths):
    sequences = [torch.randn(n, 3) for n in lengths]
    packed, cu_seqlens = pack(sequences)
    assert cu_seqlens.dtype == torch.int32
    for there, back in zip(sequences, unpack(packed, cu_seqlens), strict=True):
        assert torch.equal(there, back)
    padded, padding = pad_packed(packed, cu_seqlens)
    assert torch.equal(padding, padding_mask(torch.tensor(lengths)))
    again, offsets = pack_padded(padded, padding)
    assert torch.equal(again, packed)
    assert torch.equal(offsets, cu_seqlens)


@given(lengths_lists)
def test_buckets_hold_each_token_once_and_waste_less_than_half(lengths):
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows, tokens, slots = [], [], 0
    for numbers, places, padding in length_buckets(cu_seqlens, sum(lengths)):
        rows += numbers.tolist()
        tokens += places[~padding].tolist()
        slots += padding.numel()
    assert sorted(rows) == list(range(len(lengths)))
    assert sorted(tokens) == list(range(sum(lengths)))
    assert slots <= 2 * sum(lengths)


@given(lengths_lists)
def test_buckets_are_put_back(lengths):
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x = torch.arange(2.0 * sum(lengths)).reshape(1, -1, 2)
    found = torch.zeros_like(x)
    for _, tokens, padding in length_buckets(cu_seqlens, sum(lengths)):
        before = found.clone()
        after = put_tokens(found, tokens, padding, x[0, tokens])
        assert torch.equal(found, before)
        found = after
    assert torch.equal(found, x)


RULES = {
    "linear": lambda q, k, v, gate, **options: linear_attention(
        q, k, v, log_decay=-gate[..., 0], causal=True, **options
    ),
    "gla": lambda q, k, v, gate, **options: diagonal_linear_attention(q, k, v, -gate, **options),
    "delta": lambda q, k, v, gate, beta, **options: delta_rule(
        q, k, v, beta[..., 0], log_decay=-gate, **options
    )[0],
    "dplr": lambda q, k, v, gate, a, b, **options: dplr(q, k, v, a, b, -gate, **options)[0],
}


@pytest.mark.parametrize("name", RULES)
def test_vmap_over_any_argument_of_packed_sequences(name):
    rule, cu_seqlens = RULES[name], torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    n = rule.__code__.co_argcount
    given = [0.25 * torch.rand(1, 7, 2, 3, generator=generator, dtype=torch.double) for _ in range(n)]
    for i, x in enumerate(given):
        both, axes = torch.stack([x, 2 * x]), tuple(0 if j == i else None for j in range(n))
        run = partial(rule, cu_seqlens=cu_seqlens)
        found = torch.func.vmap(run, axes)(*given[:i], both, *given[i + 1 :])
        expected = torch.stack([run(*given[:i], each, *given[i + 1 :]) for each in both])
        torch.testing.assert_close(found, expected)


@given(lengths_lists)
def test_positions_count_from_the_start_of_each_sequence(lengths):
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    found = positions_from_cu_seqlens(cu_seqlens, sum(lengths))
    assert found.tolist() == [[i for n in lengths for i in range(n)]]


def test_padding_shifts_no_position():
    padding = torch.tensor(
        [[True, True, False, False], [False, False, True, True], [False, True, False, True]]
    )
    found = positions_from_padding(padding)
    assert found[0, 2:].tolist() == [0, 1]
    assert found[1, :2].tolist() == [0, 1]
    assert found[2, [0, 2]].tolist() == [0, 1]


def test_masks():
    assert causal_mask(2, 3).tolist() == [[True, True, False], [True, True, True]]
    assert causal_mask(3, 1).tolist() == [[False], [False], [True]]
    mask = packed_mask(torch.tensor([0, 1, 1, 3], dtype=torch.int32), 3)
    assert mask.tolist() == [[True, False, False], [False, True, True], [False, True, True]]


def test_sinusoids_are_those_of_the_paper():
    found = sinusoidal(torch.tensor([0, 7]), 6, dtype=torch.float64)
    angles = [7 / 10000 ** (i / 6) for i in (0, 2, 4)]
    expected = torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=torch.float64)
    assert found[0].tolist() == [0, 1, 0, 1, 0, 1]
    torch.testing.assert_close(found[1], expected, rtol=1e-12, atol=0)


@given(shift=st.integers(0, 100_000))
def test_rotated_products_depend_on_the_distance_only(shift):
    q, k = torch.randn(1, 1, 2, 8, dtype=torch.float64), torch.randn(1, 1, 2, 8, dtype=torch.float64)

    def product(p: int, r: int) -> torch.Tensor:
        return (rotary(q, torch.tensor([[p]])) * rotary(k, torch.tensor([[r]]))).sum(-1)

    torch.testing.assert_close(product(5 + shift, 2 + shift), product(5, 2), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(product(3 + shift, 3 + shift), (q * k).sum(-1), rtol=1e-8, atol=1e-8)


def test_rotation_is_anticlockwise_by_the_position():
    x = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64).reshape(1, 1, 1, 4)
    angles = (3.0, 3.0 / 10000**0.5)
    expected = [f(a) for a in angles for f in (math.cos, math.sin)]
    found = rotary(x, torch.tensor([[3]])).flatten()
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="dim is 5, but must be even"):
        sinusoidal(torch.arange(3), 5)
    with pytest.raises(ValueError, match=r"positions has shape \[1, 2\], but must be \[1, 3\] for x"):
        rotary(torch.rand(1, 3, 2, 4), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="sequences is empty"):
        pack([])
    with pytest.raises(ValueError, match=r"lengths has dtype torch.float32"):
        padding_mask(torch.rand(3))


def test_padding_has_the_number_of_valid_tokens_before_it_as_its_position():
    padding = torch.tensor([[True, True, False, False], [False, True, False, True]])
    assert positions_from_padding(padding).tolist() == [[0, 0, 0, 1], [0, 1, 1, 2]]


def test_gaps_are_closed_by_zeros_and_opened_again():
    x = torch.tensor([[torch.inf, 1.0, torch.nan, 2.0], [3.0, torch.nan, 4.0, 5.0]])
    (first,), padding, back = valid_tokens_first(~x.isfinite(), x)
    assert first.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert padding.tolist() == [[False, False, True, True], [False, False, False, True]]
    assert torch.equal(back(first), torch.tensor([[0.0, 1, 0, 2], [3, 0, 4, 5]]))


def test_no_more_numbers_are_rotated_than_there_are():
    x, positions = torch.randn(1, 3, 2, 4, dtype=torch.float64), torch.arange(3).unsqueeze(0)
    assert torch.equal(rotary(x, positions, dim=8), rotary(x, positions))
