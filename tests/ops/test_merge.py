import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.ops.merge import merge_softmax


def part(scores, values):
    """One softmax over some keys: its output and the logarithm of its divisor, for 3 queries."""
    if scores.shape[1] == 0:
        return values.new_zeros(3, values.shape[1]), scores.new_full((3,), -torch.inf)
    return scores.softmax(1) @ values, scores.logsumexp(1)


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), spread=st.sampled_from([1.0, 300.0]))
def test_parts_merge_to_the_whole(sizes, spread):
    generator = torch.Generator().manual_seed(sum(sizes))
    scores = (spread * torch.randn(3, sum(sizes), generator=generator, dtype=torch.float64)).requires_grad_()
    values = torch.randn(sum(sizes), 2, generator=generator, dtype=torch.float64, requires_grad=True)
    parts = [part(s, v) for s, v in zip(scores.split(sizes, 1), values.split(sizes), strict=True)]
    found, expected = merge_softmax(parts), part(scores, values)
    torch.testing.assert_close(found, expected)
    loss = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    for y in (found, expected):
        assert torch.isfinite(y[0]).all()
    if sum(sizes):
        sums = ((o * loss).sum() + lse.sum() for o, lse in (found, expected))
        a, b = (torch.autograd.grad(x, (scores, values)) for x in sums)
        torch.testing.assert_close(a, b)


def test_a_query_with_nothing_to_read_has_zero_gradients():
    o = torch.zeros(1, 2, requires_grad=True)
    lse = torch.full((1,), -torch.inf, requires_grad=True)
    merged, total = merge_softmax([(o, lse), (o, lse)])
    assert total.item() == -torch.inf
    gradients = torch.autograd.grad(merged.sum(), (o, lse))
    assert not any(g.any() for g in gradients)
