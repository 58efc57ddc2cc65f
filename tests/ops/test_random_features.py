"""Random rows follow their laws and their seed; signed features divide without changing sign."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monte_carlo import assert_mean

from unrolled.ops import random_features
from unrolled.ops.linear import LinearState, linear_attention_reference
from unrolled.ops.random_features import (
    Projection,
    draw_rows,
    signed_linear_attention,
    signed_linear_attention_step,
)

LAWS = ("orthogonal", "regularised", "independent")


def draw(n, dim, rows, seed=0):
    return draw_rows(n, dim, rows, torch.Generator().manual_seed(seed))


@given(n=st.integers(1, 30), dim=st.integers(1, 9), seed=st.integers(0, 100))
@settings(max_examples=30)
def test_rows_of_a_block_are_orthogonal(n, dim, seed):
    for block in torch.split(draw(n, dim, "orthogonal", seed), dim):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-12)
    regularised = draw(n, dim, "regularised", seed)
    torch.testing.assert_close(regularised.norm(dim=1), torch.full((n,), dim**0.5, dtype=torch.float64))


@pytest.mark.parametrize("rows", LAWS)
def test_every_row_has_mean_zero_and_covariance_one(rows):
    blocks = draw(3 * 5000, 3, rows).reshape(5000, 3, 3)
    assert_mean(blocks, torch.zeros(3, 3))
    assert_mean(blocks.mT @ blocks / 3, torch.eye(3))


@pytest.mark.parametrize("rows", ["orthogonal", "independent"])
def test_lengths_follow_the_chi_law(rows):
    squares = draw(4 * 5000, 4, rows).square().sum(1)
    assert_mean(squares, 4)  # chi-square of 4 degrees has mean 4,
    assert_mean(squares.square(), 24)  # variance 8,
    assert_mean((squares < 3.3567).double(), 0.5)  # and median 3.3567


def test_orthogonal_blocks_are_uniform():
    """Bare QR is not: Householder's convention fixes signs. Under Haar's law E[trace] = 0, E[trace^2] = 1."""
    blocks = draw(3 * 5000, 3, "regularised").reshape(5000, 3, 3) / 3**0.5
    assert_mean(blocks.diagonal(dim1=1, dim2=2).sum(1), 0)
    assert_mean(blocks.diagonal(dim1=1, dim2=2).sum(1).square(), 1)
    gaussian = torch.randn(5000, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bare = torch.linalg.qr(gaussian).Q.diagonal(dim1=1, dim2=2).sum(1)
    with pytest.raises(AssertionError):
        assert_mean(bare, 0)


def test_the_seed_and_the_count_decide_the_rows():
    first, second = Projection(2, 5, 3, "orthogonal", seed=7), Projection(2, 5, 3, "orthogonal", seed=7)
    drawn = [first.weight.clone()]
    assert not torch.equal(drawn[0][0], drawn[0][1]), "heads share their rows"
    for _ in range(2):
        first.redraw()
        drawn.append(first.weight.clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    for expected in drawn:
        assert torch.equal(second.weight, expected)
        second.redraw()
    assert not torch.equal(Projection(2, 5, 3, "orthogonal", seed=8).weight, drawn[0])


def test_a_loaded_projection_redraws_like_the_saved_one():
    saved, loaded = (Projection(1, 5, 3, "independent") for _ in range(2))
    assert not torch.equal(saved.weight, loaded.weight), "two layers share their rows by default"
    saved.redraw()
    loaded.load_state_dict(saved.state_dict())
    twin = copy.deepcopy(saved)
    for projection in (saved, loaded, twin):
        projection.redraw()
    assert torch.equal(loaded.weight, saved.weight)
    assert torch.equal(twin.weight, saved.weight)


def test_drawing_from_a_given_seed_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    Projection(1, 5, 3, "orthogonal", seed=0).redraw()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_projection_is_made_on_the_meta_device():
    with torch.device("meta"):
        projection = Projection(1, 5, 3, "orthogonal")
    assert projection.weight.is_meta


def test_shared_rows_and_rows_per_head():
    x = torch.randn(2, 7, 4, 3)
    shared = Projection(1, 5, 3, "orthogonal")
    torch.testing.assert_close(shared(x), x @ shared.weight[0].T)
    grouped = Projection(2, 5, 3, "orthogonal")
    for h in range(4):
        torch.testing.assert_close(grouped(x)[:, :, h], x[:, :, h] @ grouped.weight[h // 2].T)


def test_what_was_read_before_a_redraw_is_refused(monkeypatch):
    projection = Projection(1, 5, 3, "orthogonal")
    o, state_draw = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    assert projection.unless_redrawn(o, state_draw) is o
    projection.redraw()
    with pytest.raises(ValueError, match=r"made before a redraw \(redraws: \[0, 0\] then, 1 now\)"):
        projection.unless_redrawn(o, state_draw)
    monkeypatch.setattr(random_features, "may_read", lambda x: False)  # as on a GPU
    found = projection.unless_redrawn(o, torch.tensor([0, 1]))
    assert found[0].isnan().all()
    assert torch.equal(found[1], o[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 0, 3, "orthogonal"), "n_features is 0, but must be at least 1"),
        (
            (1, 5, 3, "gaussian"),
            "rows is 'gaussian', but must be one of orthogonal, regularised, independent",
        ),
        ((1, 5, 3, "orthogonal", -1), "seed is -1, but must be at least 0"),
        ((1, 5, 3, "orthogonal", 2**63), r"but must be below 2\^63"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Projection(*arguments)


def signed_inputs(T=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, T, 2, n, generator=generator, dtype=torch.float64) for n in (6, 6, 3))
    k = k + 3 * q.mean((0, 1))  # products of either sign, and mostly positive sums
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("causal", [True, False])
def test_signed_attention_is_linear_attention_where_nothing_is_small(causal):
    q, k, v = signed_inputs()
    gates = -torch.rand(2, 70, 2, dtype=torch.float64)
    options = {"causal": causal, "log_decay": gates}
    found, state = signed_linear_attention(q, k, v, **options)
    expected, expected_state = linear_attention_reference(q, k, v, return_state=True, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(tuple(state), tuple(expected_state))
    loss = torch.randn_like(expected)
    for x, y in zip(
        *(torch.autograd.grad((o * loss).sum(), (q, k, v)) for o in (found, expected)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_steps_continue_what_the_parallel_form_began():
    q, k, v = signed_inputs(T=9)
    expected, end = signed_linear_attention(q, k, v, causal=True)
    _, state = signed_linear_attention(q[:, :5], k[:, :5], v[:, :5], causal=True)
    for t in range(5, 9):
        o, state = signed_linear_attention_step(q[:, t], k[:, t], v[:, t], state)
        torch.testing.assert_close(o, expected[:, t])
    torch.testing.assert_close(tuple(state), tuple(end))


@pytest.mark.parametrize("divisor", [1e-8, -1e-8, 2e-6, -2e-6, 0.0])
def test_small_divisors_are_bounded_and_keep_their_sign(divisor):
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k, v = q * divisor, q * 3
    bounded = max(abs(divisor), 1e-6) * (-1 if divisor < 0 else 1)
    expected = 3 * divisor / bounded
    state = LinearState(torch.zeros_like(q), torch.zeros_like(q[0]))
    step, _ = signed_linear_attention_step(q[0], k[0], v[0], state)
    for o in (signed_linear_attention(q, k, v)[0], step):
        assert o.item() == pytest.approx(expected, abs=1e-12)


def test_a_state_of_another_size_is_refused():
    q, k, v = signed_inputs(T=3)
    state = LinearState(torch.zeros(2, 2, 6, 4).double(), torch.zeros(2, 2, 6).double())
    with pytest.raises(ValueError, match=r"state.kv is .* \[2, 2, 6, 4\], but must be .* \[2, 2, 6, 3\]"):
        signed_linear_attention(q, k, v, causal=True, state=state)
