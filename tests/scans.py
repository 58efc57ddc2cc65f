"""Shared by the tests of scans, whose inputs are tensors and a state, and whose outputs have a state too."""

import torch


def results(form, given, exact=False, **options):
    """Outputs, and the gradients of a sum of both that weighs every element differently."""
    given = [(x.double() if exact else x).detach().requires_grad_() for x in given]
    *inputs, state = given
    outputs = form(*inputs, state=state, **options)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.double) for x in outputs]
    loss = sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True))
    loss = loss + 0 * sum(x.sum() for x in given)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, given)]


def assert_close(names, found, expected, tolerance=1e-5):
    for name, ours, theirs in zip(names, found, expected, strict=True):
        torch.testing.assert_close(
            ours.double(),
            theirs.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )
