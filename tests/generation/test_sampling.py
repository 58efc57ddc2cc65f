"""The filters keep exactly the sets that they define, and the draw follows the distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unrolled.generation import sampling

# Halves between -4 and 4, so that equal logits are common.
rows = st.lists(st.integers(-8, 8), min_size=1, max_size=12)
batches = st.integers(1, 12).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-8, 8), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


def logits_of(batch: list[list[int]]) -> Tensor:
    return torch.tensor(batch, dtype=torch.float64) / 2


def kept(logits: Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def ranked(row: Tensor) -> list[int]:
    """Token ids, the most likely first, the lower id first among equals."""
    return sorted(range(len(row)), key=lambda token: (-row[token].item(), token))


@given(batches, st.integers(1, 15))
def test_top_k_keeps_the_first_k_by_likelihood_then_id(batch: list[list[int]], k: int) -> None:
    logits = logits_of(batch)
    filtered = sampling.top_k(logits, k)
    assert kept(filtered) == [set(ranked(row)[:k]) for row in logits]


@given(batches, st.floats(0.01, 1))
def test_top_p_keeps_the_smallest_set_with_mass_p(batch: list[list[int]], p: float) -> None:
    logits = logits_of(batch)
    rounding = 1e-12
    for row, tokens in zip(logits, kept(sampling.top_p(logits, p)), strict=True):
        order, probabilities = ranked(row), row.softmax(-1)
        assert tokens == set(order[: len(tokens)])
        mass = [probabilities[token].item() for token in order[: len(tokens)]]
        assert len(mass) >= 1
        assert math.fsum(mass) >= p - rounding
        assert p == 1 or math.fsum(mass[:-1]) < p + rounding


def test_top_p_takes_the_lower_ids_among_equals() -> None:
    assert kept(sampling.top_p(torch.zeros(1, 1000), 0.25)) == [set(range(250))]
    assert kept(sampling.top_k(torch.zeros(1, 1000), 3)) == [{0, 1, 2}]


def test_top_p_adds_probabilities_up_in_their_order() -> None:
    """So does the C++ loop: other sums, such as the sum up to a token less its own share, round otherwise."""
    for n in range(2, 40):
        for k in range(1, n):
            before, count = 0.0, 0
            while before < k / n:
                before, count = before + 1 / n, count + 1
            assert kept(sampling.top_p(torch.zeros(1, n), k / n)) == [set(range(count))]


def test_top_p_of_one_keeps_even_what_rounding_would_lose() -> None:
    assert kept(sampling.top_p(torch.tensor([[0.0, -200.0]]), 1.0)) == [{0, 1}]


@given(batches, st.floats(0.001, 1))
def test_min_p_is_relative_to_the_most_likely(batch: list[list[int]], p: float) -> None:
    logits = logits_of(batch)
    for row, tokens in zip(logits, kept(sampling.min_p(logits, p)), strict=True):
        relative = (row - row.max()).exp()
        assert {i for i, r in enumerate(relative) if r > p * (1 + 1e-12)} <= tokens
        assert tokens <= {i for i, r in enumerate(relative) if r > p * (1 - 1e-12)}
        assert int(row.argmax()) in tokens


@given(
    batches,
    st.floats(0, 10),
    st.integers(1, 12),
    st.floats(1e-6, 1),
    st.floats(0, 1),
    st.floats(0.1, 10),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_no_chain_of_filters_leaves_nothing(
    batch: list[list[int]], t: float, k: int, p: float, m: float, penalty: float, dtype: torch.dtype
) -> None:
    logits = logits_of(batch).to(dtype)
    seen = logits > 0
    filtered = sampling.repetition_penalty(logits, seen, penalty)
    filtered = sampling.min_p(sampling.top_p(sampling.top_k(sampling.temperature(filtered, t), k), p), m)
    assert filtered.dtype == dtype
    assert filtered.shape == logits.shape
    assert all(1 <= len(tokens) <= k for tokens in kept(filtered))
    assert not filtered.isnan().any()


@given(rows, st.floats(0.2, 5))
def test_temperature_raises_probabilities_to_a_power(row: list[int], t: float) -> None:
    logits = logits_of([row])
    power = logits.softmax(-1) ** (1 / t)
    expected = power / power.sum(-1, keepdim=True)
    torch.testing.assert_close(sampling.temperature(logits, t).softmax(-1), expected)


@pytest.mark.parametrize("t", [0.0, 1e-300])
def test_temperature_towards_zero_is_greedy(t: float) -> None:
    logits = torch.tensor([[1e30, 3e30, 2e30]], dtype=torch.float64)
    assert kept(sampling.temperature(logits, t)) == [{1}]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    penalised = sampling.repetition_penalty(logits, seen, 4.0)
    assert penalised.tolist() == [[0.5, -8.0, 2.0, -2.0]]


@given(rows, st.integers(0, 2**32))
def test_sample_never_draws_an_excluded_token(row: list[int], seed: int) -> None:
    logits = sampling.top_k(logits_of([row] * 20), 2)
    draws = [sampling.uniform(seed, i) for i in range(20)]
    allowed = kept(logits)[0]
    assert set(sampling.sample(logits, draws).tolist()) <= allowed


def test_sample_follows_the_distribution() -> None:
    n = 20_000
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64)
    draws = [sampling.uniform(0, i) for i in range(n)]
    tokens = sampling.sample(probabilities.log().expand(n, -1), draws)
    frequencies = torch.bincount(tokens, minlength=5) / n
    five_sigma = 5 * (probabilities * (1 - probabilities) / n).sqrt()
    assert ((frequencies - probabilities).abs() <= five_sigma).all()


def test_a_row_draws_the_same_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))

    def draw(rows: list[int]) -> list[int]:
        return sampling.sample(logits[rows], [sampling.uniform(row, 0) for row in rows]).tolist()

    together = draw([0, 1, 2, 3, 4])
    assert draw([3]) == [together[3]]
    assert draw([4, 0]) == [together[4], together[0]]


def test_random_numbers_are_those_of_split_mix() -> None:
    # The first outputs of the reference implementation by Vigna (prng.di.unimi.it/splitmix64.c), seeded with 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [sampling.uniform(1234567, i) for i in range(4)] == [(x >> 11) / 2**53 for x in expected]
    assert sampling.uniform(-1, 5) == sampling.uniform(2**64 - 1, 5)
    numbers = [sampling.uniform(7, i) for i in range(10_000)]
    assert 0 <= min(numbers) < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 5 / 12**0.5 / 100


def test_sample_of_no_rows() -> None:
    assert sampling.sample(torch.zeros(0, 3), []).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sample_refuses_logits_that_are_no_distribution(bad: float) -> None:
    logits = torch.zeros(2, 3)
    logits[1, 0] = bad
    with pytest.raises(ValueError, match="row 1 hold NaN, "):
        sampling.sample(logits, [0.1, 0.2])
    with pytest.raises(ValueError, match="must define a distribution"):
        sampling.sample(torch.full((1, 3), -math.inf), [0.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: sampling.temperature(x, -1),
            "temperature is -1, but must be a finite number of at least 0",
        ),
        (lambda x: sampling.temperature(x, math.nan), "temperature"),
        (lambda x: sampling.top_k(x, 0), "top_k is 0, but must be an integer of at least 1"),
        (lambda x: sampling.top_p(x, 0.0), r"top_p is 0.0, but must be in \(0, 1\]"),
        (lambda x: sampling.top_p(x, 1.5), r"top_p is 1.5, but must be in \(0, 1\]"),
        (lambda x: sampling.min_p(x, 1.1), r"min_p is 1.1, but must be in \[0, 1\]"),
        (lambda x: sampling.repetition_penalty(x, x > 0, 0.0), "repetition_penalty"),
        (lambda x: sampling.repetition_penalty(x, x, 2), "seen is .* but must be bool"),
        (lambda x: sampling.repetition_penalty(x, x[:, :2] > 0, 2), "seen is .* but must be bool"),
        (lambda x: sampling.sample(x, [1.0]), r"draws are \[1.0\], but must be in \[0, 1\)"),
        (lambda x: sampling.sample(x, []), r"draws has 0, but must have one per row of logits \(1, 3\)"),
    ],
)
def test_wrong_input_is_one_sentence(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 3))  # type: ignore[operator]


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.long), torch.tensor(0.5)]
)
def test_logits_are_numbers_of_at_least_one_token(logits) -> None:
    for call in (lambda: sampling.sample(logits, [0.1, 0.2]), lambda: sampling.top_k(logits, 2)):
        with pytest.raises(ValueError, match=r"logits is .*, but must be floating point \[N, V\] with V of"):
            call()


def test_the_smallest_draw_is_of_a_token_that_is_kept() -> None:
    assert sampling.sample(torch.tensor([[-math.inf, 0.0, 0.0]]), [0.0]).tolist() == [1]


def test_the_largest_draw_is_of_a_token_whatever_the_probabilities_sum_to() -> None:
    logits = torch.randn(500, 50, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    assert (logits.softmax(-1).cumsum(-1)[:, -1] < 1 - 2**-53).any()
    assert sampling.sample(logits, [1 - 2**-53] * 500).max() < 50
