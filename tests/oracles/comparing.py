"""Comparing an implementation with another one: the output, and the gradients of all inputs."""

import torch
from agreement import assert_agree, gradients


def random_inputs(T=150, H=2, D=8, M=5):
    """Queries, keys and values in fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, T, H, D), (2, T, H, D), (2, T, H, M)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def assert_all_agree(found, expected, inputs, what, *, tolerance=1e-5, library=None):
    assert_agree(found, expected, what, tolerance=tolerance, library=library)
    for x, y in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert_agree(x, y, f"{what}, gradient {list(x.shape)}", tolerance=tolerance, library=library)
