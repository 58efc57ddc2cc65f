"""Mixtures of a tensor with another one, each with its own shares.

    y_z = x + mu_z * (other - x)

On a CPU, a C++ kernel makes one pass over the memory. Compilers, exporters and transforms see plain
operations, which they can fuse and differentiate.
"""

from typing import Any

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.dispatch import runs_native
from unrolled.ops.native import TYPES, address, struct
from unrolled.ops.operators import differentiable_gradients
from unrolled.ops.precision import autocast_dtype


def mixtures(x: Tensor, other: Tensor, mu: Tensor) -> tuple[Tensor, ...]:
    """Mix `x` and `other`, both `[...,C]`, by each row of `mu [n,C]`.

    This function checks nothing.

    Returns:
        n tensors like `x`. Under autocast, the kernel writes them in the type of autocast, to which a linear
        layer would convert them.
    """
    if _supports(x, other, mu):
        dtype = autocast_dtype(x.device) if x.dtype == torch.float32 else None
        mixed: tuple[Tensor, ...] = _Mixed.apply(x, other, mu, dtype or x.dtype)  # type: ignore[no-untyped-call]
        return mixed
    return _plain(x, other, mu)


def _supports(x: Tensor, other: Tensor, mu: Tensor) -> bool:
    same_type = x.dtype == other.dtype and torch.promote_types(x.dtype, mu.dtype) == x.dtype
    return same_type and len(mu) > 0 and runs_native(x, other, mu)


def _plain(x: Tensor, other: Tensor, mu: Tensor) -> tuple[Tensor, ...]:
    difference = other - x
    return tuple(x + difference * each for each in mu.unbind())


class _Mixed(torch.autograd.Function):
    """The operation by the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, mu: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, other, mu)
        mixed = tuple(x.new_empty(x.shape, dtype=dtype) for _ in mu)
        problem, _kept = _problem(x, other, mu, mixed)
        native.call("mixtures", problem)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, other, mu = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *differentiable_gradients(_plain, (x, other, mu), [g.to(x.dtype) for g in grads]), None
        problem, _kept = _problem(x, other, mu, grads)
        d_x, d_other, d_mu = x.new_empty(x.shape), x.new_empty(x.shape), native.floats(*mu.shape)
        gradients = struct("MixturesGradients")(
            d_x=address(d_x), d_other=address(d_other), d_shares=address(d_mu)
        )
        native.call("mixtures_backward", problem, gradients)
        return d_x, d_other, d_mu.to(mu.dtype), None


def _problem(
    x: Tensor, other: Tensor, mu: Tensor, mixed: tuple[Tensor, ...]
) -> tuple[bytes, tuple[Tensor, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    x, other, *mixed_rows = (y.resolve_neg().contiguous() for y in (x, other, *mixed))
    shares = mu.resolve_neg().float().contiguous()
    addresses = torch.tensor([y.data_ptr() for y in mixed_rows], dtype=torch.int64, device="cpu")
    problem = struct("Mixtures")(
        rows=x.numel() // max(x.shape[-1], 1),
        channels=x.shape[-1],
        mixtures=len(mu),
        type=TYPES[x.dtype],
        mixed_type=TYPES[mixed_rows[0].dtype],
        threads=torch.get_num_threads(),
        x=address(x),
        other=address(other),
        shares=address(shares),
        mixed=address(addresses),
    )
    return problem, (x, other, shares, addresses, *mixed_rows)
