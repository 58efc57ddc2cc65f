"""Rotation of pairs of numbers by given angles, the operation behind rotary positions.

On a CPU, a C++ kernel rotates all pairs in one pass over the memory. Compilers, exporters and transforms see
plain operations, which they can fuse and differentiate.
"""

from typing import Any

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.dispatch import runs_native
from unrolled.ops.native import TYPES, address, readable, struct, view
from unrolled.ops.precision import accumulation_dtype


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first P pairs (x_2i, x_2i+1) of each head by angles; copy the numbers after them.

        y_2i = x_2i cos_i - x_2i+1 sin_i,    y_2i+1 = x_2i sin_i + x_2i+1 cos_i

    Su et al. 2021, "RoFormer" (arXiv 2104.09864), eq. 34. This function checks nothing:
    `unrolled.ops.positions.rotary` checks its arguments, and computes the angles from positions.

    Args:
        x: `[...,H,D]`, with D >= 2 P.
        cos: cosines of the angles, `[...,P]`; the first axis may be of size 1, for angles that all rows
            share. The angles are constants: only `x` has a gradient.
        sin: sines of the angles, of the same shape.

    Returns:
        A tensor like `x`. 16-bit inputs are rotated in fp32 and rounded once.
    """
    fits = x.dim() == 4 and cos.shape[:2] in (x.shape[:2], (1, x.shape[1]))
    if fits and runs_native(x):
        y: Tensor = _Rotated.apply(x, cos.float(), sin.float())  # type: ignore[no-untyped-call]
        return y
    return _plain(x, cos, sin)


def _plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([_plain(x[..., :turned], cos, sin), x[..., turned:]], dim=-1)
    exact = accumulation_dtype(x.dtype)
    cos, sin = cos.to(exact).unsqueeze(-2), sin.to(exact).unsqueeze(-2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class _Rotated(torch.autograd.Function):
    """The rotation by the kernel. Its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _kernel(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_pairs(grads[0], cos, -sin), None, None


def _kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (B, T, H, D), P = x.shape, cos.shape[-1]
    x, cos, sin = readable(x.resolve_neg()), cos.resolve_neg().contiguous(), sin.resolve_neg().contiguous()
    y = x.new_empty(x.shape)
    problem = struct("Rotary")(
        rows=B,
        tokens=T,
        heads=H,
        width=D,
        pairs=P,
        type=TYPES[x.dtype],
        threads=torch.get_num_threads(),
        shared=cos.shape[0] == 1,
        x=view(x),
        cos=address(cos),
        sin=address(sin),
        y=address(y),
    )
    native.call("rotary", problem)
    return y
