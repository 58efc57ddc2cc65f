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
