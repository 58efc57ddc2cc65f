"""How far two implementations of one function differ: asserted, and kept for the table of agreement."""

import torch

TABLE: list[tuple[str, str, float]] = []
"""Theirs, what was compared, and the largest difference over the largest value."""


def assert_agree(ours, theirs, what="output", *, tolerance=1e-5, library=None):
    """Fail unless the largest difference is within `tolerance` of the largest value of `theirs` (or of 1).

    With a `library`, the difference enters the table that `make test-oracles` prints.
    """
    ours, theirs = ours.detach().double(), theirs.detach().double()
    assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)}, theirs {list(theirs.shape)}"
    scale = max(1.0, float(theirs.abs().max()))
    difference = float((ours - theirs).abs().max()) / scale
    if library is not None:
        TABLE.append((library, what, difference))
    assert difference <= tolerance, (
        f"{what}: {difference:.2g} of the largest value, {tolerance:.2g} is allowed"
    )


def gradients(output, inputs):
    """Gradients of `inputs` for one fixed random loss."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)


def normal(*shape, seed=0):
    """A standard normal tensor in fp64, from its own generator."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(found, expected, inputs, *, rtol=1e-10, atol=1e-10):
    """Fail unless the gradients of `inputs` agree for one fixed random loss of both outputs."""
    loss = normal(*expected.shape, seed=9)
    pairs = (
        torch.autograd.grad(y, inputs, loss, retain_graph=True, materialize_grads=True)
        for y in (found, expected)
    )
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def assert_same(found, expected, inputs, *, rtol=1e-11, atol=1e-11):
    """Fail unless two outputs and the gradients of `inputs` agree."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    assert_same_gradients(found, expected, inputs, rtol=10 * rtol, atol=10 * atol)
