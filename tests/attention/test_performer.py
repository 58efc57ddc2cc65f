"""What is specific to Performer: its kernels, its errors, and a stabiliser that does not leak."""

import math

import pytest
import torch
from agreement import assert_same
from contract_parts import check_uncompiled, in_two_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from monte_carlo import assert_mean, assert_monte_carlo_rate

from unrolled.attention.performer import (
    GENERALISED,
    SOFTMAX,
    FavorMap,
    PerformerAttention,
    favor_attention,
    favor_attention_reference,
)
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.random_features import Projection
from unrolled.testing import Maker

KINDS = (*SOFTMAX, *GENERALISED)


def feature_map(features, n_features=32, dim=8, rows="orthogonal", heads=1, seed=0):
    return FavorMap(dim, features, Projection(heads, n_features, dim, rows, seed)).double()


def inputs(T=9, H=2, D=8, B=2, std=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return std * q, std * k, v


def softmax(q, k, v, causal=False):
    weights = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    if causal:
        weights = weights.masked_fill(torch.ones(q.shape[1], k.shape[1]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhts,bshm->bthm", weights.softmax(-1), v)


@pytest.mark.slow
@in_two_parts
def test_deterministic_features_keep_the_contract(check_part):
    check_part(Maker(PerformerAttention, {"features": "relu", "rows": "identity"}))


class SmallScores(Maker):
    """Halves queries and keys: the features' variance grows with their norm, and a divisor near 0 amplifies rounding."""

    def __call__(self, **options):
        module = super().__call__(**options)
        rows = (module.n_heads + module.n_kv_heads) * module.head_dim
        with torch.no_grad():
            module.qkv_proj.weight[:rows] /= 2
        return module


@pytest.mark.slow
def test_trigonometric_features_keep_the_contract():
    """`rfa` compiles the same attention."""
    check_uncompiled(SmallScores(PerformerAttention, {"features": "trigonometric", "per_head": True}))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", KINDS)
def test_shifting_changes_nothing(features, causal):
    """The parallel form against the definition without any shift, with gradients."""
    q, k, v = (x.requires_grad_() for x in inputs(T=70))
    phi = feature_map(features)
    found, _ = favor_attention(q, k, v, phi, causal=causal)
    expected = favor_attention_reference(q, k, v, phi, causal=causal)
    assert_same(found, expected, (q, k, v))


@given(
    T=st.integers(1, 12), S=st.integers(1, 12), G=st.integers(1, 3), M=st.integers(1, 5), causal=st.booleans()
)
@settings(max_examples=25)
def test_any_shape_agrees_with_the_definition(T, S, G, M, causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, T, 2 * G, 4), (2, S, G, 4), (2, S, G, M))
    )
    phi = feature_map("positive", dim=4, heads=G)
    found, _ = favor_attention(q, k, v, phi, causal=causal)
    expected = favor_attention_reference(
        q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), phi, causal=causal
    )
    nothing_to_read = max(0, T - S) if causal else 0
    assert (found[:, :nothing_to_read] == 0).all()
    torch.testing.assert_close(found[:, nothing_to_read:], expected[:, nothing_to_read:])


@pytest.mark.parametrize("features", SOFTMAX)
def test_it_tends_to_softmax_at_the_monte_carlo_rate(features):
    q, k, v = inputs(T=24, H=1, B=1)

    def estimate(n_features, seed):
        phi = feature_map(features, n_features, rows="independent", seed=seed)
        return favor_attention(q, k, v, phi, causal=True)[0]

    assert_monte_carlo_rate(estimate, softmax(q, k, v, causal=True))


def products(features, x, y, n, rows="independent"):
    """Many estimates exp(x . y) of one row each, `[n]`, for x and y already scaled by D^(-1/4)."""
    D = len(x)
    phi = feature_map(features, n, dim=D, rows=rows)
    q, k = (phi(z.view(1, D) * D**0.25).shifted(torch.zeros(1)) for z in (x, y))
    terms = (q * k)[0] * n
    return terms if features == "positive" else terms[:n] + terms[n:]


X = torch.tensor([0.5, -0.3, 0.2, 0.1], dtype=torch.float64)
Y = torch.tensor([0.4, 0.2, -0.3, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("features", SOFTMAX)
def test_errors_of_the_kernel_are_those_of_the_paper(features):
    """Lemma 2 of arXiv 2009.14794, for one row: unbiased, and the mean squared errors."""
    kernel, total, difference = ((X @ Y).exp(), (X + Y).square().sum(), (X - Y).square().sum())
    positive = total.exp() * kernel**2 * (1 - (-total).exp())
    squared_error = {
        "trigonometric": total.exp() * kernel**-2 * (1 - (-difference).exp()) ** 2 / 2,
        "positive": positive,
        "hyperbolic": positive * (1 - (-total).exp()) / 2,
    }[features]
    estimates = products(features, X, Y, 200_000)
    assert_mean(estimates, kernel)
    assert_mean((estimates - kernel).square(), squared_error)


def test_orthogonal_rows_reduce_the_error_as_theorem_2_says():
    D, n = 4, 400_000
    kernel, total = (X @ Y).exp(), (X + Y).square().sum()
    estimates = products("positive", X, Y, n, "orthogonal").view(-1, D).mean(1)
    errors = (estimates - kernel).square()
    independent = total.exp() * kernel**2 * (1 - (-total).exp()) / D  # lemma 2
    least = 2 * (D - 1) / (D * (D + 2)) * (kernel - (-(X @ X + Y @ Y) / 2).exp()) ** 2
    noise = errors.std() / len(errors) ** 0.5
    assert least > 5 * noise, "the two kinds of rows could not be told apart"
    assert independent - errors.mean() >= least - 5 * noise


def test_regularised_rows_stay_below_softmax():
    kernel = (X @ Y).exp()
    estimates = products("positive", X, Y, 200_000, "regularised").view(-1, 4).mean(1)
    error = estimates.std() / len(estimates) ** 0.5
    assert kernel * (1 - 2 * 4 ** (-1 / 3)) - 5 * error < estimates.mean() < kernel + 5 * error


@pytest.mark.parametrize(
    ("std", "n_features", "low", "high"),
    [(0.5, 256, 0.4, 0.6), (0.5, 8192, 0.07, 0.13), (1.0, 256, 1, math.inf), (1.0, 8192, 1, math.inf)],
)
def test_what_the_docstring_says_of_its_error(std, n_features, low, high):
    """Relative to the output, D = 64 and 128 tokens, mean of five draws: 0.46, 0.10, 2.4 and 1.8."""
    errors = []
    for seed in range(5):
        q, k, v = inputs(T=128, H=1, D=64, B=1, std=std, seed=seed)
        found, _ = favor_attention(q, k, v, feature_map("positive", n_features, 64, seed=seed))
        expected = softmax(q, k, v)
        errors.append(float((found - expected).norm() / expected.norm()))
    assert low < sum(errors) / 5 < high


def test_exponents_that_no_float_holds():
    """Keys of norm 60: exp(-|y|^2/2) is 0 in fp32, and every unshifted weight with it."""
    q, k, v = inputs(T=40, D=8, std=1.0)
    q, k = q * 2, k * 60 / k.norm(dim=-1, keepdim=True)
    phi = feature_map("positive", 64)
    exact = favor_attention_reference(q, k, v, phi, causal=True)
    found, state = favor_attention(q.float(), k.float(), v.float(), phi.float(), causal=True)
    assert (phi(k.float()).shifted(torch.zeros(2, 40, 2)) == 0).all()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-3)
    assert state.k_sum.isfinite().all()
    assert (state.k_sum > 0).any()


@pytest.mark.parametrize("name", ["positive", "hyperbolic"])
def test_features_are_at_most_one_however_long_the_vectors_are(name):
    q, k, v = (x.float() for x in inputs(T=40, D=64, std=3e4))
    phi = feature_map(name, 64, 64).float()
    found, state = favor_attention(q, k, v, phi, causal=True)
    assert found.isfinite().all()
    assert state.k_sum.isfinite().all()
    shifted = phi(k)
    assert (shifted.shifted(shifted.peak()).abs() <= 1).all()


def test_the_state_is_the_sum_of_features_times_its_scale():
    q, k, v = inputs()
    phi = feature_map("positive")
    _, state = favor_attention(q, k, v, phi, causal=True)
    features = phi(k).shifted(torch.zeros(2, 9, 2))
    torch.testing.assert_close(state.log_scale, features.amax((1, -1)).log())
    torch.testing.assert_close(state.k_sum * state.log_scale.exp().unsqueeze(-1), features.sum(1))
    kv = torch.einsum("bsgr,bsgm->bgrm", features, v)
    torch.testing.assert_close(state.kv * state.log_scale.exp()[..., None, None], kv)


def test_heads_may_have_rows_of_their_own():
    module = PerformerAttention(8, 4, n_kv_heads=2, per_head=True)
    rows = module.feature_map.projection.weight
    assert rows.shape == (2, 256, 2)
    assert not torch.equal(rows[0], rows[1])
    assert PerformerAttention(8, 4).feature_map.projection.weight.shape == (1, 256, 2)


def test_a_module_with_rotary_positions_tends_to_the_softmax_one():
    x = inputs(T=12, H=1, D=16, B=1)[2].squeeze(2)
    torch.manual_seed(0)
    softmax_module = SoftmaxAttention(16, 2, causal=True, rotary=True).double()
    softmax_module.qkv_proj.weight.data[:32] /= 2  # small queries and keys

    def estimate(n_features, seed):
        module = PerformerAttention(
            16, 2, causal=True, rotary=True, n_features=n_features, rows="independent", seed=seed
        ).double()
        module.load_state_dict(softmax_module.state_dict(), strict=False)
        return module(x)

    with torch.no_grad():
        assert_monte_carlo_rate(estimate, softmax_module(x))


def test_only_redraw_changes_the_features():
    module = PerformerAttention(16, 4, seed=3)
    x = torch.randn(2, 9, 16)
    y = module(x)
    assert torch.equal(module.train()(x), y)
    module.redraw()
    redrawn = module(x)
    assert not torch.equal(redrawn, y)
    twin = PerformerAttention(16, 4, seed=3)
    twin.load_state_dict(
        {name: w for name, w in module.state_dict().items() if "projection" not in name}, strict=False
    )
    twin.redraw()
    assert torch.equal(twin(x), redrawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "softmax"}, "features is 'softmax', but must be one of positive, hyperbolic"),
        ({"n_features": 0}, "n_features is 0, but must be at least 1"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"rows": "gaussian"}, "rows is 'gaussian', but must be one of"),
        ({"rows": "identity"}, "rows is 'identity', but must be random for positive features"),
        ({"rows": "identity", "features": "relu", "n_features": 5}, "n_features is 5, .* must be 4 or None"),
        ({"rows": "identity", "features": "relu", "seed": 5}, "seed 5, but must be .* None for rows"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        PerformerAttention(16, 4, **options)


def test_what_identity_rows_cannot_do():
    with pytest.raises(
        UnsupportedError, match="identity rows cannot express rotary positions; use random rows"
    ):
        PerformerAttention(16, 4, features="relu", rows="identity", rotary=True)
    with pytest.raises(UnsupportedError, match="identity rows are not random; use rows='orthogonal'"):
        PerformerAttention(16, 4, features="relu", rows="identity").redraw()


def test_identity_rows_are_the_definition():
    q, k, v = inputs()
    weights = torch.einsum("bthd,bshd->bhts", q.relu() + 1e-3, k.relu() + 1e-3)
    expected = torch.einsum("bhts,bshm->bthm", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(favor_attention(q, k, v, FavorMap(8, "relu", None))[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_of_a_state_has_a_gradient_in_every_form(dtype):
    torch.manual_seed(0)
    module, x = (
        PerformerAttention(8, 2, causal=True, n_features=8).to(dtype),
        torch.randn(1, 5, 8, dtype=dtype),
    )
    _, state = module.prefill(x[:, :4], module.init_state(1))

    def gradient(run):
        scale = state.log_scale.detach().requires_grad_()
        return torch.autograd.grad(run(state._replace(log_scale=scale)).square().sum(), scale)[0]

    of_step = gradient(lambda state: module.step(x[:, 4], state)[0])
    assert of_step.abs().max() > 0
    torch.testing.assert_close(gradient(lambda state: module.prefill(x[:, 4:], state)[0]), of_step)
