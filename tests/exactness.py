"""Shared by the tests of kernels: their errors, against those of other forms."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Form = Callable[[object, bool], Sequence[Tensor]]
"""Results of the inputs of a draw, in fp64 if the second argument is True."""


def assert_as_exact(
    names: Sequence[str],
    draw: Callable[[int], object],
    draws: int,
    *,
    definition: Form,
    ours: Form,
    others: Sequence[Form],
    least: float,
) -> None:
    """The error against the definition in fp64, over all draws, is at most twice that of the other forms.

    The draws are taken together: the error of a few numbers is chance. An error of `least` roundings to fp32
    always counts as that of another form.
    """
    errors = [torch.zeros(len(names)).double() for _ in (ours, *others)]
    sizes = torch.zeros(len(names)).double()
    for seed in range(draws):
        given = draw(seed)
        exact = definition(given, True)
        sizes += torch.stack([z.square().sum() for z in exact])
        for form, sums in zip((ours, *others), errors, strict=True):
            found = zip(form(given, False), exact, strict=True)
            sums += torch.stack([(x.double() - z).square().sum() for x, z in found])
    of_ours, *of_others = (sums.sqrt() for sums in errors)
    floor = least * torch.finfo(torch.float32).eps * sizes.sqrt()
    allowed = 2 * torch.stack(of_others).amax(0).maximum(floor)
    both = zip(of_ours.tolist(), allowed.tolist(), strict=True)
    assert (of_ours <= allowed).all(), dict(zip(names, both, strict=True))


def rows_for(*widths: int) -> int:
    """How many rows have enough numbers between them for one draw."""
    return 2 * max(4, 64 // torch.Size(widths).numel())
