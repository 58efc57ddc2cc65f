"""The norm of heads: its definition, its size, and that neither fp16 nor zeros break it."""

import pytest
import torch

from unrolled.ops.head_norm import HeadRMSNorm


def test_each_head_is_normalised_by_itself():
    norm = HeadRMSNorm(3, 5).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64) * torch.tensor([1e-2, 1.0, 1e6])[:, None]
    for h in range(3):
        expected = torch.nn.functional.rms_norm(x[..., h, :], [5], norm.weight[h], eps=1e-5)
        torch.testing.assert_close(norm(x)[..., h, :], expected)


def test_a_step_has_the_axes_of_a_step():
    norm, x = HeadRMSNorm(3, 5), torch.randn(2, 4, 3, 5)
    torch.testing.assert_close(norm(x[:, 1]), norm(x)[:, 1])


def test_sums_beyond_fp16_become_fp16():
    y = HeadRMSNorm(1, 2).half()(torch.tensor([[[3e6, 4e6]]]))
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, torch.tensor([[[0.6, 0.8]]]).half() * 2**0.5)


def test_zero_stays_zero_with_a_finite_gradient():
    x = torch.zeros(1, 1, 2, 4, requires_grad=True)
    y = HeadRMSNorm(2, 4)(x)
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"x has shape \[1, 2, 4\], but must be \[\.\.\., 2, 5\]"):
        HeadRMSNorm(2, 5)(torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"gate has shape \[1, 2, 5\], but must be \[3, 2, 5\], as x"):
        HeadRMSNorm(2, 5)(torch.zeros(3, 2, 5), torch.zeros(1, 2, 5))
