"""Normalisation of the outputs of heads that have no softmax denominator."""

import torch
from torch import Tensor, nn

from unrolled.ops.checks import wrong_shape
from unrolled.ops.head_scale import GateFunction, scale_heads
from unrolled.ops.options import check_above_zero


class HeadRMSNorm(nn.Module):
    """y_h = w_h * x_h / sqrt(mean(x_h^2) + eps): RMS normalisation (arXiv 1910.07467, eq. 4) of each head.

    With a gate, the result is y_h * g(gate_h), where g is silu or the logistic function, or with `gate_first`
    the norm of x_h * g(gate_h).

    A sum over the keys that is not divided by a denominator grows with the length. After normalisation, its
    scale is that of w. The norm is computed in at least fp32. Pass such a sum in fp32, since it may overflow
    in fp16.

    Args:
        n_heads: number of heads H.
        head_dim: width M of a head.
        eps: added to the mean square, so that a head of zeros gives 0 with a finite gradient.

    Raises:
        ValueError: eps is not above 0.
    """

    not_decayed = ("weight",)

    def __init__(self, n_heads: int, head_dim: int, eps: float = 1e-5):
        super().__init__()
        check_above_zero(eps=eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(n_heads, head_dim))

    def forward(
        self,
        x: Tensor,
        gate: Tensor | None = None,
        gate_function: GateFunction = "silu",
        *,
        gate_first: bool = False,
    ) -> Tensor:
        """Normalise `[..., H, M]`; the result has the dtype of the weight. `gate` has the shape of `x`."""
        if x.shape[-2:] != self.weight.shape:
            raise wrong_shape("x", x, f"[..., {', '.join(map(str, self.weight.shape))}]")
        if gate is not None and gate.shape != x.shape:
            raise wrong_shape("gate", gate, f"{list(x.shape)}, as x")
        M = x.shape[-1]
        y = scale_heads(
            x,
            M**0.5,
            M * self.eps,
            weight=self.weight,
            gate=gate,
            gate_function=gate_function,
            gate_first=gate_first,
        )
        return y.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        n_heads, head_dim = self.weight.shape
        return f"n_heads={n_heads}, head_dim={head_dim}, eps={self.eps}"
