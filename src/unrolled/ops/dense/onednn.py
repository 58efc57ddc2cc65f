"""Linear layers of many rows in fp32 by oneDNN, on processors where torch's own products are slow.

On x86, torch multiplies fp32 matrices with MKL, whose fast code is for Intel's processors. The table gives
GFLOP/s of one thread, for 784 and 4,096 rows and widths of 256 to 1,024:

                                      multiply-adds at most   MKL          oneDNN
    Zen 5, y = x W^T                  236                     87 to 95     191 to 207
    Zen 5, gradient of x              236                     87 to 95     192 to 211
    Zen 5, gradient of W              236                     87 to 95     176 to 240
    Zen 4, y = x W^T                  117                     85 to 104    103 to 111
    Zen 4, gradient of x              117                     86 to 104    104 to 114
    Zen 4, gradient of W              117                     91 to 102    85 to 102
    Zen 2, y = x W^T                  102                     35 to 72     44 to 89
    Zen 2, gradient of x              102                     35 to 73     43 to 84
    Zen 2, gradient of W              102                     41 to 70     36 to 72
    Xeon with AVX-512, y = x W^T      242                     170 to 200   116 to 202
    Xeon with AVX-512, gradient of x  242                     196 to 213   116 to 207
    Xeon with AVX-512, gradient of W  242                     179 to 197   108 to 181

Other programs ran beside on the Zen 2. In most cases there, oneDNN was level or up to 1.3 times as fast.

So the choice is by the processor's vendor. Choosing by a measurement would let two runs of one program differ
in rounding, but a resumed run must give the same results as an uninterrupted one.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unrolled.ops.observing import observed
from unrolled.ops.processor import description

LEAST_ROWS, LEAST_WIDTH = 64, 64
"""Smaller layers were not measured. With 64 rows, oneDNN reaches 133 to 195 GFLOP/s on the Xeon."""


@cache
def faster() -> bool:
    """Whether oneDNN is faster on this machine, and torch has it."""
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not has_mkl or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return "AuthenticAMD" in description()


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN should compute this layer: fp32, many rows, and nothing but autograd observes it."""
    # Shapes are not numbers while a layer is traced.
    if torch.compiler.is_compiling() or not faster() or observed():
        return False
    tensors = [y for y in (x, weight, bias) if y is not None]
    return (
        all(type(y) in (Tensor, Parameter) and y.is_cpu and y.dtype == torch.float32 for y in tensors)
        and all(y.layout is torch.strided and not y.is_neg() for y in tensors)
        and x.dim() > 1
        and weight.dim() == 2
        and min(weight.shape) >= LEAST_WIDTH
        and x.shape[-1] == weight.shape[1]
        and x.numel() >= LEAST_ROWS * weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x W^T + b` for `x [..., in]`, `weight [out, in]`, `bias [out]`; derivatives of any order."""
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True
            return (
                grad @ weight if of_x else None,
                grad.mT @ x if of_weight else None,
                grad.sum(0) if of_bias else None,
            )
        return (
            _product(grad, weight.mT) if of_x else None,
            _of_weight(grad, x) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient `grad^T x` of W.

    oneDNN is faster with the wider factor as the second: by 1.3 for 4,096 rows and widths of 256 and 1,024.
    """
    if x.shape[1] < grad.shape[1]:
        return _product(x.mT, grad.mT).mT.contiguous()
    return _product(grad.mT, x.mT)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x W^T + b`.

    oneDNN takes 1,000 times as long if the rows of W, or of its transpose, are parts of longer rows. The rows
    of x may be. It reads b as if it were contiguous.
    """
    bias = None if bias is None else bias.contiguous()
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
