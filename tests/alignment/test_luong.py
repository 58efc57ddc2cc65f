"""Scores and windows against their equations, and what equals what."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import alignment
from unrolled.alignment.luong import (
    SCORES,
    FlooredPredictiveAttention,
    LocalMonotonicAttention,
    LocalPredictiveAttention,
    LuongAttention,
    ScaledScoresAttention,
)

Q, T, S = 4, 5, 8
PADDING = torch.zeros(2, S, dtype=torch.bool)
PADDING[0, [0, 3, 6]] = True


def made(kind, *args, **options):
    torch.manual_seed(0)
    module = kind(*args, **options).double()
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    return module


def inputs(memory_dim=Q, length=S):
    generator = torch.Generator().manual_seed(1)
    shapes = (2, T, Q), (2, length, memory_dim)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def score_written_out(module, name, h, m, place):
    score = module.score
    if name == "dot":
        return sum(a * b for a, b in zip(h, m, strict=True))
    if name == "general":
        return h @ score.key_proj.weight @ m
    if name == "concat":
        W_a = torch.cat([score.query_proj.weight, score.key_proj.weight], 1)
        return score.v @ torch.tanh(W_a @ torch.cat([h, m]))
    if name == "query_concat":
        return score.v @ torch.tanh(m + score.query_proj.weight @ h)
    return (score.place_proj.weight @ h)[place]


def weights_written_out(module, name, query, memory, padding, window=lambda t, h, n: (None, None)):
    """Softmax over the places in a window (centre, D), and the Gaussian (p, sigma) after it."""
    rows = torch.zeros(*query.shape[:2], memory.shape[1], dtype=torch.float64)
    for i in range(len(query)):
        read = [s for s in range(memory.shape[1]) if not padding[i, s]]
        for t, h in enumerate(query[i]):
            limits, gaussian = window(t, h, len(read))
            inside = [
                (place, s)
                for place, s in enumerate(read)
                if limits is None or limits[0] - limits[1] <= place <= limits[0] + limits[1]
            ]
            e = torch.stack([score_written_out(module, name, h, memory[i, s], p) for p, s in inside]).exp()
            for (place, s), x in zip(inside, e / e.sum(), strict=True):
                shape = (
                    1 if gaussian is None else math.exp(-((place - gaussian[0]) ** 2) / 2 / gaussian[1] ** 2)
                )
                rows[i, t, s] = x * shape
    return rows


def ask(module, query, memory, padding=PADDING):
    context, weights, _ = module.recall(query, module.read(memory, key_padding_mask=padding))
    return context, weights


@torch.no_grad()
@pytest.mark.parametrize("name", SCORES)
def test_global_attention_is_the_softmax_of_its_scores(name):
    width = 6 if name in ("general", "concat") else Q
    module = made(LuongAttention, Q, width, score=name)
    query, memory = inputs(width)
    context, weights = ask(module, query, memory)
    expected = weights_written_out(module, name, query, memory, PADDING)
    torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(context, expected @ memory, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_local_m_looks_around_t():
    module = made(LocalMonotonicAttention, Q, window=1)
    query, memory = inputs()
    _, weights = ask(module, query, memory)
    expected = weights_written_out(
        module, "general", query, memory, PADDING, lambda t, h, n: ((min(t, n - 1), 1), None)
    )
    torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-12)
    assert weights[0, 4].nonzero().flatten().tolist() == [5, 7]  # the last two places that are no padding


@torch.no_grad()
@pytest.mark.parametrize("kind", [LocalPredictiveAttention, FlooredPredictiveAttention])
def test_local_p_looks_around_the_place_it_predicts(kind):
    module = made(kind, Q, window=2)
    query, memory = inputs()

    def window(t, h, n):
        sigmoid = 1 / (1 + math.exp(-float(module.place_v.weight @ torch.tanh(module.place_proj.weight @ h))))
        p = (n if kind is LocalPredictiveAttention else n - 1) * sigmoid
        return (p if kind is LocalPredictiveAttention else math.floor(p), 2), (p, 1.0)

    _, weights = ask(module, query, memory)
    expected = weights_written_out(module, "general", query, memory, PADDING, window)
    torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-12)
    assert (weights.sum(-1) < 1).all()


@torch.no_grad()
def test_scaled_scores_add_up_to_one_and_differ():
    query, memory = inputs()
    scaled, after = (
        ask(made(k, Q, window=2), query, memory)[1]
        for k in (ScaledScoresAttention, FlooredPredictiveAttention)
    )
    torch.testing.assert_close(scaled.sum(-1), torch.ones(2, T, dtype=torch.float64))
    assert torch.equal(scaled > 0, after > 0)
    assert (scaled - after).abs().max() > 0.1


@torch.no_grad()
def test_scaled_scores_by_hand():
    module = made(ScaledScoresAttention, Q, window=3, score="dot")
    query, memory = inputs()
    _, weights = ask(module, query, memory, torch.zeros(2, S, dtype=torch.bool))
    h, m = query[1, 2], memory[1]
    p = (S - 1) * torch.sigmoid(module.place_v(torch.tanh(module.place_proj(h)))).item()
    inside = [s for s in range(S) if abs(s - math.floor(p)) <= 3]
    e = torch.stack([(h @ m[s]) * math.exp(-((s - p) ** 2) / (2 * 1.5**2)) for s in inside])
    torch.testing.assert_close(weights[1, 2, inside], e.softmax(0), rtol=1e-11, atol=1e-12)


def compared(ours, others, query, memory):
    """Outputs and gradients of query and memory."""
    results = []
    for module in (ours, others):
        q, m = query.clone().requires_grad_(), memory.clone().requires_grad_()
        y = module(q, m, key_padding_mask=PADDING)
        results.append([y, *torch.autograd.grad(y.square().sum(), [q, m])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@settings(max_examples=10)
@given(st.sampled_from(list(SCORES)), st.integers(S, 3 * S))
def test_a_window_of_the_whole_sentence_without_a_gaussian_is_global_attention(score, window):
    whole = made(LuongAttention, Q, score=score)
    for kind, options in (
        (LocalMonotonicAttention, {}),
        (LocalPredictiveAttention, {"sigma": math.inf}),
        (FlooredPredictiveAttention, {"sigma": math.inf}),
        (ScaledScoresAttention, {"sigma": math.inf}),
    ):
        local = made(kind, Q, score=score, window=window, **options)
        local.load_state_dict(whole.state_dict(), strict=False)
        compared(local, whole, *inputs())


def test_a_predicted_place_learns_through_the_gaussian_alone():
    query, memory = inputs()
    for sigma, learns in ((1.0, True), (math.inf, False)):
        module = made(FlooredPredictiveAttention, Q, window=3, sigma=sigma)
        module(query, memory).square().sum().backward()
        assert bool(module.place_v.weight.grad.any()) is learns


@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32))
def test_windows_are_never_empty(length, window, seed):
    generator = torch.Generator().manual_seed(seed)
    query = 10 * torch.randn(2, 6, Q, generator=generator, dtype=torch.float64)
    memory = torch.randn(2, length, Q, generator=generator, dtype=torch.float64)
    for kind in (
        LocalMonotonicAttention,
        LocalPredictiveAttention,
        FlooredPredictiveAttention,
        ScaledScoresAttention,
    ):
        _, weights = ask(made(kind, Q, window=window), query, memory, None)
        assert (weights.sum(-1) > 0).all()
        assert ((weights > 0).sum(-1) <= 2 * window + 1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LuongAttention(4, score="dott"), "score is 'dott', but must be one of dot, general"),
        (lambda: LuongAttention(4, 5, score="dot"), "query_dim is 4 and memory_dim 5, .* 'general'"),
        (
            lambda: LocalMonotonicAttention(4, window=0),
            "window is 0, but must be a whole number of at least 1",
        ),
        (lambda: LocalPredictiveAttention(4, sigma=0.0), "sigma is 0.0, but must be above 0"),
        (
            lambda: LuongAttention(4, score="location", max_length=3)(
                torch.zeros(1, 1, 4), torch.zeros(1, 5, 4)
            ),
            "memory has length 5, but must have at most max_length = 3",
        ),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_variants_are_loaded_by_their_names():
    assert alignment.load("luong") is LuongAttention
    assert alignment.load("luong.LocalPredictiveAttention") is LocalPredictiveAttention
    with pytest.raises(ValueError, match=r"attention is 'luong\.Nope', but luong has LuongAttention, Local"):
        alignment.load("luong.Nope")


def test_the_vector_of_concat_starts_in_proportion_to_its_width():
    torch.manual_seed(0)
    v = LuongAttention(64, 64, score="concat").score.v
    assert 0.9 / 8 < v.abs().max() <= 1 / 8
