"""Linear layers that are fast for a few rows too, as in a step of generation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.ops.checks import inferring
from unrolled.ops.dense import native


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b, as `torch.nn.functional.linear`: `x [..., in]`, `weight [out, in]` -> `[..., out]`.

    A few rows of x have to read all of W, and torch's products of matrices do not read it in the order of
    memory. So they run in a kernel of their own in eager inference on a CPU.
    """
    eager = inferring(x, weight, bias) and not torch.is_autocast_enabled(x.device.type)
    if eager and native.supports(x, weight, bias):
        return native.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return linear(x, self.weight, self.bias)
