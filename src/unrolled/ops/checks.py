"""Checks of the arguments that the attention functions share. Each failure is one sentence."""

from itertools import pairwise

import torch
from torch import Tensor


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Require `q [B,T,H,R]`, `k [B,S,G,R]`, `v [B,S,G,M]` with H a multiple of G."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {shape(x)}, but must have four axes: batch, length, heads, width"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}, but must be a floating-point tensor")
    B, S, G, R = k.shape
    if q.shape[0] != B or q.shape[3] != R:
        raise ValueError(f"q has shape {shape(q)}, but k {shape(k)} wants q [{B}, T, H, {R}]")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {shape(v)}, but k {shape(k)} wants v [{B}, {S}, {G}, M]")
    if G == 0 or q.shape[2] % G:
        raise ValueError(f"q has {q.shape[2]} heads, but they must be a multiple of the {G} heads of k and v")


def check_key_padding_mask(mask: Tensor, batch: int, length: int) -> None:
    """Require a boolean `[B,S]` mask (True = padding)."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask has dtype {mask.dtype}, but must be torch.bool with True = padding"
        )
    if mask.shape != (batch, length):
        raise ValueError(f"key_padding_mask has shape {shape(mask)}, but must be [{batch}, {length}]")


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Require int32 `[N+1]` offsets that rise from 0 to T, on a batch of one with T = S.

    The values are read only where that needs no device synchronisation, that is on a CPU.
    """
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {shape(cu_seqlens)}, but must be torch.int32 [N+1]"
        )
    if q.shape[0] != 1 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"cu_seqlens packs sequences into one row with T = S, but q has shape {shape(q)} and k {shape(k)}"
        )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        offsets = cu_seqlens.tolist()
        rising = all(a <= b for a, b in pairwise(offsets))
        if offsets[0] != 0 or offsets[-1] != q.shape[1] or not rising:
            raise ValueError(
                f"cu_seqlens must rise from 0 to T = {q.shape[1]} without falling, found {offsets}"
            )


def shape(x: Tensor) -> list[int]:
    """Shape of a tensor as error messages print it."""
    return list(x.shape)
