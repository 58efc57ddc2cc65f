"""What is drawn follows the probabilities, and REINFORCE estimates the gradient of the expected likelihood."""

from itertools import product

import pytest
import torch

from unrolled.alignment.bahdanau import BahdanauAttention
from unrolled.alignment.hard import (
    GatedSoftAttention,
    HardAttention,
    StraightThroughAttention,
    coverage_penalty,
    drawn,
    moving_baseline,
    reinforce_loss,
    uniform,
)

B, T, S, Q, M = 2, 2, 3, 4, 5


def made(kind, **options):
    torch.manual_seed(0)
    module = kind(Q, M, **options).double()
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    return module


def inputs(batch=B, queries=T, length=S):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in ((batch, queries, Q), (batch, length, M))
    ]


def log_likelihood(context, target):
    """A toy log p(y|c): of one target number for each row, Gaussian around a function of all contexts."""
    return -(context.tanh().sum((1, 2)) - target).square() / 2


def test_evaluation_reads_the_most_probable_place():
    module = made(HardAttention).eval()
    query, memory = inputs()
    state = module.read(memory)
    context, glimpse, _ = module.recall(query, state)
    place = module.probabilities(query, state).argmax(-1)
    assert torch.equal(glimpse.argmax(-1), place)
    assert torch.equal(glimpse.sum(-1), torch.ones(B, T, dtype=torch.float64))
    torch.testing.assert_close(context, memory.gather(1, place.unsqueeze(-1).expand(-1, -1, M)))


def test_probabilities_are_those_of_additive_attention():
    module = made(HardAttention)
    query, memory = inputs()
    state, additive = module.read(memory), made(BahdanauAttention)
    additive.load_state_dict(module.state_dict() | {}, strict=False)
    _, expected, _ = additive.recall(query, additive.read(memory))
    torch.testing.assert_close(module.probabilities(query, state), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [HardAttention, StraightThroughAttention])
def test_what_is_drawn_depends_on_the_state_alone(kind):
    module = made(kind, seed=3).train()
    query, memory = inputs(4, 20, 6)
    state = module.read(memory)
    before = torch.get_rng_state()
    _, together, _ = module.recall(query, state)
    steps, carried = [], state
    for h in query.unbind(1):
        _, glimpse, carried = module.recall(h.unsqueeze(1), carried)
        steps.append(glimpse)
    torch.testing.assert_close(torch.cat(steps, 1), together, rtol=0, atol=1e-14)
    assert torch.equal(torch.get_rng_state(), before)
    other = module.read(memory)  # another memory begun: other draws
    assert not torch.equal(module.recall(query, other)[1], together)
    assert int(module.begun) == 2
    twin = made(kind, seed=3).train()  # the same from the beginning
    torch.testing.assert_close(twin.recall(query, twin.read(memory))[1], together, rtol=0, atol=0)
    differently = made(kind, seed=4).train()
    assert not torch.equal(differently.recall(query, differently.read(memory))[1], together)


def test_modules_of_other_seeds_never_draw_the_same():
    _, memory = inputs()
    seeds = []
    for seed in range(4):
        module = made(HardAttention, seed=seed).train()
        seeds += [tuple(module.read(memory).seed.tolist()) for _ in range(4)]
    assert len(set(seeds)) == 16


def test_places_are_drawn_by_their_probabilities():
    """By the chi-squared statistic of 20,000 draws: its 99.99% quantile for 4 degrees of freedom is 23.5."""
    p = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.15, 0.1], dtype=torch.float64)
    n = 20_000
    u = uniform(torch.arange(100).unsqueeze(1), torch.arange(n // 100))
    assert 0 <= float(u.min()) <= float(u.max()) < 1
    counts = drawn(p.expand(100, n // 100, 6), u).flatten().bincount(minlength=6)
    assert counts[1] == 0
    kept = p > 0
    assert float(((counts - n * p)[kept].square() / (n * p[kept])).sum()) < 23.5


def expectation(module, query, memory, target):
    """E[log p(y|c)] over all sequences of places, and for each: probability, places one-hot."""
    state = module.read(memory)
    a = module.probabilities(query, state)
    total, cases = 0.0, []
    for places in product(range(S), repeat=T):
        glimpse = torch.eye(S, dtype=torch.float64)[list(places)].expand(B, T, S)
        probability = (a * glimpse).sum(-1).prod(1)
        total = total + probability * log_likelihood(glimpse @ memory, target)
        cases.append((probability.detach(), glimpse))
    return total.mean(), cases


def test_the_mean_of_the_estimates_is_the_gradient_of_the_expectation():
    """By enumeration: weighting each case's surrogate gradient with its probability leaves no chance."""
    module = made(HardAttention).train()
    query, memory = (x.requires_grad_() for x in inputs())
    target = torch.tensor([0.3, -0.8], dtype=torch.float64)
    of = [query, memory, *module.parameters()]
    exact, cases = expectation(module, query, memory, target)
    expected = torch.autograd.grad(exact, of)
    for baseline in (0.0, -1.7):
        mean = [torch.zeros_like(x) for x in of]
        for probability, glimpse in cases:
            a = module.probabilities(query, module.read(memory))
            for row in range(B):
                likelihood = log_likelihood(glimpse @ memory, target)[row : row + 1]
                loss = reinforce_loss(a[row : row + 1], glimpse[row : row + 1], likelihood, baseline)
                gradient = torch.autograd.grad(
                    loss, of, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                for total, g in zip(mean, gradient, strict=True):
                    total -= probability[row] / B * g
        for found, exactly in zip(mean, expected, strict=True):
            torch.testing.assert_close(found, exactly, rtol=1e-10, atol=1e-12)


def test_drawn_glimpses_give_it_within_chance():
    """The mean of 4,000 estimates is within 5 standard errors of the exact gradient, coordinate by coordinate."""
    module = made(HardAttention).train()
    query, memory = inputs()
    target = torch.tensor([0.3, -0.8], dtype=torch.float64)
    exact, _ = expectation(module, query, memory, target)
    (expected,) = torch.autograd.grad(exact, [module.v])
    n = 4000
    copies = [x.repeat(n, 1, 1) for x in (query, memory)]
    state = module.read(copies[1])
    context, glimpse, _ = module.recall(copies[0], state)
    with torch.no_grad():
        advantage = log_likelihood(context, target.repeat(n))
    # gradient of sum_t log a(s_t) by v, for each row: that of a linear function of v inside a softmax
    hidden = torch.tanh(module.query_proj(copies[0]).unsqueeze(2) + module.key_proj(copies[1]).unsqueeze(1))
    a = module.probabilities(copies[0], state).detach()
    score = ((glimpse - a).unsqueeze(-1) * hidden.detach()).sum((1, 2))
    estimates = (advantage.unsqueeze(-1) * score).view(n, B, -1).mean(1)
    error = (estimates.mean(0) - expected).abs() / (estimates.std(0) / n**0.5)
    assert float(error.max()) < 5
    loss = reinforce_loss(
        module.probabilities(copies[0], state), glimpse, log_likelihood(context, target.repeat(n)), 0.0
    )
    (ours,) = torch.autograd.grad(-loss, [module.v])
    torch.testing.assert_close(ours, estimates.mean(0), rtol=1e-10, atol=1e-12)


def test_the_entropy_is_a_term_and_padding_of_the_target_does_not_count():
    a = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    glimpse = torch.tensor([[[1.0, 0, 0], [0, 0, 1]]], dtype=torch.float64)
    reward = torch.tensor([-2.0], dtype=torch.float64)
    entropy = torch.tensor([0.5, 0.5]).log().neg().mean().double()
    rest = -(a[0, 1] * a[0, 1].log()).sum()
    bare = reinforce_loss(a, glimpse, reward, -1.0, entropy_weight=0.0)
    full = reinforce_loss(a, glimpse, reward, -1.0, entropy_weight=0.1)
    torch.testing.assert_close(bare - full, 0.1 * (entropy + rest))
    torch.testing.assert_close(
        bare, -(reward[0] - (torch.tensor(0.5).log() + torch.tensor(0.5).log())).double()
    )
    mask = torch.tensor([[False, True]])
    masked = reinforce_loss(a, glimpse, reward, -1.0, entropy_weight=0.1, target_padding_mask=mask)
    torch.testing.assert_close(
        masked, reinforce_loss(a[:, :1], glimpse[:, :1], reward, -1.0, entropy_weight=0.1)
    )


def test_the_baseline_is_a_moving_average():
    reward = torch.tensor([-1.0, -3.0], requires_grad=True)
    b = moving_baseline(0.0, reward)
    torch.testing.assert_close(b, torch.tensor(-0.2))
    torch.testing.assert_close(moving_baseline(b, reward), torch.tensor(-0.38))
    assert not b.requires_grad


def test_straight_through_has_the_gradient_of_soft_attention():
    straight, soft = made(StraightThroughAttention).train(), made(BahdanauAttention)
    soft.load_state_dict(straight.state_dict(), strict=False)
    query, memory = inputs()
    direction = torch.randn(B, T, M, dtype=torch.float64)
    found = torch.autograd.grad((straight(query, memory) * direction).sum(), list(straight.parameters()))
    expected = torch.autograd.grad((soft(query, memory) * direction).sum(), list(soft.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_gate_scales_the_expectation():
    gated, soft = made(GatedSoftAttention), made(BahdanauAttention)
    soft.load_state_dict({k: v for k, v in gated.state_dict().items() if "gate" not in k})
    query, memory = inputs()
    expected = torch.sigmoid(gated.gate_proj(query)) * soft(query, memory)
    torch.testing.assert_close(gated(query, memory), expected, rtol=1e-12, atol=1e-13)


def test_the_penalty_counts_what_each_place_lacks():
    weights = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]])
    torch.testing.assert_close(coverage_penalty(weights), torch.tensor(0.0625 + 0.0625 + 1.0))
    mask = torch.tensor([[False, False, True]])
    torch.testing.assert_close(coverage_penalty(weights, mask), torch.tensor(0.125))


def test_the_least_number_draws_no_position_of_weight_0():
    weights = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.0, 0.0]])
    assert drawn(weights, torch.zeros(3)).tolist() == [1, 0, 1]
