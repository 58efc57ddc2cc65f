import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unrolled.models import heads
from unrolled.models.heads import Categorical, LogisticMixture, mean_nll

LEVELS = st.integers(2, 256)
EXTREMES = st.one_of(
    st.floats(-8, 8, width=32),
    st.floats(-1e4, 1e4, width=32),
    st.sampled_from([-1e30, -1e9, -88.0, 0.0, 88.0, 1e9, 1e30]),
)


def mixture_with(parameters: torch.Tensor, levels: int) -> LogisticMixture:
    """A head that says `parameters` [3 K] whatever it is shown."""
    head = LogisticMixture(1, levels, len(parameters) // 3).to(parameters.dtype)
    nn.init.zeros_(head.project.weight)
    with torch.no_grad():
        head.project.bias.copy_(parameters)
    return head


@given(levels=LEVELS, values=st.lists(EXTREMES, min_size=6, max_size=6))
@settings(max_examples=200)
def test_the_mixture_is_a_distribution_with_finite_gradients_at_any_parameters(levels, values):
    head = mixture_with(torch.tensor(values), levels)
    log_probs = head.log_probs(torch.zeros(1))
    assert log_probs.dtype == torch.float32
    assert (log_probs <= 1e-5).all()
    assert log_probs.isfinite().all()
    torch.testing.assert_close(
        log_probs.double().exp().sum(), torch.ones((), dtype=torch.double), atol=2e-5, rtol=0
    )
    for level in {0, levels // 2, levels - 1}:
        (gradient,) = torch.autograd.grad(log_probs[level], head.project.bias, retain_graph=True)
        assert gradient.isfinite().all()


@given(levels=st.integers(2, 64), seed=st.integers(0, 2**31))
@settings(max_examples=50)
def test_the_mixture_is_equation_2_of_pixelcnn_pp(levels, seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(9, dtype=torch.double, generator=generator)
    weight, mean, log_scale = parameters.chunk(3)
    half = 1 / (levels - 1)
    x = torch.linspace(-1, 1, levels, dtype=torch.double)[:, None]
    scale = log_scale.exp()
    below, above = ((x - half - mean) / scale).sigmoid(), ((x + half - mean) / scale).sigmoid()
    below[0], above[-1] = 0, 1
    expected = (weight.softmax(0) * (above - below)).sum(1)
    found = mixture_with(parameters, levels).log_probs(torch.zeros(1, dtype=torch.double)).exp()
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_scale_below_the_floor_is_the_floor():
    floor = mixture_with(torch.tensor([0.0, 0.1, -7.0]), 256).log_probs(torch.zeros(1))
    assert torch.equal(mixture_with(torch.tensor([0.0, 0.1, -20.0]), 256).log_probs(torch.zeros(1)), floor)
    assert not torch.equal(mixture_with(torch.tensor([0.0, 0.1, -6.9]), 256).log_probs(torch.zeros(1)), floor)


def test_components_start_evenly_spread():
    head = LogisticMixture(4, 256, 10)
    head.reset_bias()
    p = head.log_probs(torch.zeros(4)).exp()
    assert 0.5 / 256 < p.min() <= p[1:-1].max() < 2 / 256
    torch.testing.assert_close(p, p.flip(0))


@pytest.mark.parametrize("head", [Categorical(8, 11, bias=True), LogisticMixture(8, 11, 3)])
def test_nll_is_minus_the_log_probability_of_the_target(head):
    head.double()
    hidden = torch.randn(3, 5, 8, dtype=torch.double)
    target = torch.randint(11, (3, 5))
    expected = -head.log_probs(hidden).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(head.nll(hidden, target), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(head(hidden).log_softmax(-1), head.log_probs(hidden), atol=1e-12, rtol=0)


@pytest.mark.parametrize("head", [Categorical(8, 11), LogisticMixture(8, 11, 3)])
def test_ignored_targets_cost_nothing_and_have_no_gradient(head):
    hidden = torch.randn(4, 8, requires_grad=True)
    target = torch.tensor([3, -100, 10, -100])
    nll = head.nll(hidden, target)
    assert (nll[1::2] == 0).all()
    torch.testing.assert_close(mean_nll(nll, target), (nll[0] + nll[2]) / 2)
    mean_nll(nll, target).backward()
    assert (hidden.grad[1::2] == 0).all()
    assert (hidden.grad[::2] != 0).any()
    nothing = torch.full((4,), -100)
    assert mean_nll(head.nll(hidden, nothing), nothing) == 0


LARGE = heads.MANY_LEVELS


def head_of_many_levels(kind):
    if kind == "tied":
        table = nn.Embedding(LARGE + 3, 8)
        return Categorical(8, LARGE, bias=True, tied=lambda: table)
    return Categorical(8, LARGE, bias=kind == "bias")


@pytest.mark.parametrize("kind", ["bias", "no bias", "tied"])
def test_with_many_levels_the_loss_is_the_same_without_all_logits(kind, monkeypatch):
    torch.manual_seed(0)
    head = head_of_many_levels(kind).double()
    weights = [*head.parameters(), *([head.table.weight] if kind == "tied" else [])]
    for weight in weights:
        weight.data = torch.randn(weight.shape, dtype=torch.double)
    hidden = torch.randn(3, 5, 8, dtype=torch.double, requires_grad=True)
    target, padding = torch.randint(LARGE, (3, 5)), torch.rand(3, 5) < 0.3
    target[0, 0] = -100
    masked = target.masked_fill(padding, -100)
    expected = mean_nll(head.nll(hidden, masked), masked)
    expected = [expected, *torch.autograd.grad(expected, [hidden, *weights])]
    monkeypatch.setattr(Categorical, "forward", None)
    found = head.loss(hidden, target, padding)
    torch.testing.assert_close([found, *torch.autograd.grad(found, [hidden, *weights])], expected)


def test_hooks_of_the_output_layer_are_called_with_many_levels_too():
    head = head_of_many_levels("no bias")
    hidden, target = torch.randn(4, 8), torch.randint(LARGE, (4,))
    without = head.loss(hidden, target)
    head.project.register_forward_hook(lambda module, inputs, logits: 0 * logits)
    assert head.loss(hidden, target).item() == pytest.approx(math.log(LARGE)) != without.item()


def test_the_loss_of_the_mixture_keeps_no_tensor_of_all_levels():
    length, levels, n_mixtures = 32, 256, 10
    head = LogisticMixture(8, levels, n_mixtures)
    hidden, target = torch.randn(length, 8, requires_grad=True), torch.randint(levels, (length,))
    saved: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        head.nll(hidden, target).sum().backward()
        assert max(saved) <= 3 * length * n_mixtures
        head.log_probs(hidden).sum().backward()
        assert max(saved) >= length * levels * n_mixtures


@pytest.mark.parametrize("head", [Categorical(8, 11), LogisticMixture(8, 11, 3)])
def test_half_precision_weights_still_give_fp32_losses(head):
    head.bfloat16()
    hidden = torch.randn(4, 8, dtype=torch.bfloat16)
    assert head.nll(hidden, torch.randint(11, (4,))).dtype == torch.float32
    assert head.log_probs(hidden).dtype == torch.float32


def test_autocast_does_not_round_the_mixture():
    head, hidden, target = LogisticMixture(8, 256, 3), torch.randn(5, 8), torch.randint(256, (5,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = head.nll(hidden, target)
    assert torch.equal(under_autocast, head.nll(hidden, target))


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_are_called_with_many_levels_too(hook):
    head, called = head_of_many_levels("no bias"), []
    getattr(head.project, hook)(lambda module, *gradients: called.append(module))
    head.loss(torch.randn(4, 8, requires_grad=True), torch.randint(LARGE, (4,))).backward()
    assert called == [head.project]


def test_hooks_of_the_head_itself_are_called_with_many_levels_too():
    head = head_of_many_levels("no bias")
    head.register_forward_hook(lambda module, inputs, logits: 0 * logits)
    assert head.loss(torch.randn(4, 8), torch.randint(LARGE, (4,))).item() == pytest.approx(math.log(LARGE))
