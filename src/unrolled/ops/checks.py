"""Checks of the arguments that the attention functions share. Each failure is one sentence."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unrolled.ops.observing import may_read
from unrolled.ops.precision import autocast_dtype


def wrong(name: str, found: object, must_be: object) -> ValueError:
    """Make the error of a wrong argument; a tensor is described by its dtype and shape."""
    if isinstance(found, Tensor):
        found = f"{found.dtype} of shape {shape(found)}"
    return ValueError(f"{name} is {found}, but must be {must_be}")


def wrong_shape(name: str, x: Tensor, must_be: object) -> ValueError:
    """Make the error of a tensor of the wrong shape."""
    return ValueError(f"{name} has shape {shape(x)}, but must be {must_be}")


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> None:
    """Require `q [B,T,H,R]`, `k [B,S,G,R]`, `v [B,S,G,M]` with H a multiple of G, and masks that fit."""
    _check_heads(q, k, v, 4, "must have four axes: batch, length, heads, width", "T, ")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, k)
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, *k.shape[:2])


def check_step(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Require `q [B,H,R]`, `k [B,G,R]`, `v [B,G,M]` with H a multiple of G: one token of each."""
    _check_heads(q, k, v, 3, "must have three axes: batch, heads, width", "")


def _check_heads(q: Tensor, k: Tensor, v: Tensor, n_axes: int, axes: str, length: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but must be on {q.device} like q")
        if x.dim() != n_axes:
            raise ValueError(f"{name} has shape {shape(x)}, but {axes}")
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}, but must be a floating-point tensor")
    B, *_, G, R = k.shape
    if q.shape[0] != B or q.shape[-1] != R:
        raise ValueError(f"q has shape {shape(q)}, but must be [{B}, {length}H, {R}] for k {shape(k)}")
    if v.shape[:-1] != k.shape[:-1]:
        sizes = ", ".join(map(str, [*k.shape[:-1], "M"]))
        raise ValueError(f"v has shape {shape(v)}, but must be [{sizes}] for k {shape(k)}")
    if G == 0 or q.shape[-2] % G:
        raise ValueError(f"q has {q.shape[-2]} heads, but must have a multiple of the {G} heads of k and v")


def check_tensor(name: str, x: object) -> None:
    """Require a tensor, of any shape and type."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, but must be a tensor")


def on_cpu(name: str, ids: Tensor | Sequence[int]) -> Tensor:
    """Copy ids to the CPU.

    Raises:
        ValueError: the ids are on the meta device, where they have no values, or cannot be made a tensor.
    """
    if isinstance(ids, Tensor) and ids.is_meta:
        raise ValueError(f"{name} is on meta, but must hold ids")
    try:
        if not len(ids):
            return torch.empty(0, dtype=torch.long, device="cpu")
        return torch.as_tensor(ids, device="cpu")
    except (RuntimeError, TypeError, ValueError) as error:
        raise wrong(name, repr(ids), "a sequence of whole numbers of at most 64 bits") from error


def is_integral(x: Tensor) -> bool:
    """Whether a tensor holds whole numbers; bool does not count as one."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_device(name: str, x: Tensor, weight: Tensor, others: str = "the weights are") -> None:
    """Require `x` on the device of the weights, unless they are on meta, as in an offloaded module."""
    if x.device != weight.device and not weight.is_meta:
        raise ValueError(f"{name} is on {x.device}, but {others} on {weight.device}: move one of them")


def check_key_padding_mask(mask: Tensor, batch: int, length: int) -> None:
    """Require a boolean `[B,S]` mask (True = padding)."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"key_padding_mask is a {type(mask).__name__}, but must be a boolean tensor")
    if mask.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask has dtype {mask.dtype}, but must be torch.bool with True = padding"
        )
    if mask.shape != (batch, length):
        raise ValueError(f"key_padding_mask has shape {shape(mask)}, but must be [{batch}, {length}]")


def check_attn_mask(mask: Tensor, sizes: tuple[int, ...]) -> None:
    """Require a boolean (True = attend) or floating-point mask that broadcasts to `sizes` = [B,H,T,S]."""
    check_tensor("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attn_mask has dtype {mask.dtype}, but must be torch.bool (True = attend) or floating point"
        )
    pairs = zip(reversed(mask.shape), reversed(sizes), strict=False)
    if mask.dim() > 4 or not all(a in (1, b) for a, b in pairs):
        raise ValueError(
            f"attn_mask has shape {shape(mask)}, but must broadcast to [B, H, T, S] = {list(sizes)}"
        )


def check_state_tensor(
    name: str, x: Tensor, sizes: Sequence[int], dtype: torch.dtype, tokens: Tensor
) -> None:
    """Require a tensor of a state to have this shape and type, on the device of the tokens."""
    if not isinstance(x, Tensor):  # tested here to save a function call, since every step runs this check
        check_tensor(name, x)
    if x.shape != sizes or x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype} of shape {shape(x)}, but must be {dtype} {list(sizes)}")
    check_device(name, x, tokens, "the tokens are")


def check_log_decay(log_decay: Tensor, k: Tensor, axes: str, padding: Tensor | None = None) -> None:
    """Require floating-point logarithms of gates on the device of `k`, at most 0 if they may be read.

    Their shape is that of the leading axes of `k`, as many axes as `axes` names. At padding (`[B,S]`, True),
    they may have any value.
    """
    check_tensor("log_decay", log_decay)
    sizes = k.shape[: axes.count(",") + 1]
    if log_decay.shape != sizes or not log_decay.is_floating_point():
        raise wrong("log_decay", log_decay, f"floating point {axes} = {list(sizes)}")
    check_device("log_decay", log_decay, k, "k is")
    if not may_read(log_decay):
        return
    read = log_decay if padding is None else log_decay[~padding]
    if bool((read > 0).any()):
        raise wrong("log_decay", f"up to {read.max().item():g}", "at most 0 (a gate of at most 1)")


def check_rates(name: str, x: Tensor) -> None:
    """Require rates of decay that are at most 0 and finite, if they may be read."""
    if not x.numel() or not may_read(x):
        return
    low, high = (each.item() for each in x.aminmax())
    if high > 0:
        raise wrong(name, f"up to {high:g}", "at most 0")
    if low == -math.inf:
        raise wrong(name, "as low as -inf", "finite")


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Require non-decreasing int32 `[N+1]` offsets from 0 to T (if they may be read), B = 1 and T = S."""
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens is a {type(cu_seqlens).__name__}, but must be a tensor of int32")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise wrong("cu_seqlens", cu_seqlens, "torch.int32 [N+1]")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, but there are {q.shape[0]}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            "cu_seqlens packs sequences of as many queries as keys, but there are "
            f"{q.shape[1]} and {k.shape[1]}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, but must be on {q.device} like the tokens")
    if may_read(cu_seqlens):
        check_offsets(cu_seqlens.tolist(), q.shape[1])


def check_padding_or_pack(key_padding_mask: Tensor | None, cu_seqlens: Tensor | None, x: Tensor) -> None:
    """Require that a mask or offsets fit `x [B,T,C]`, and that only one of them is given."""
    if key_padding_mask is not None:
        if cu_seqlens is not None:
            raise ValueError(
                "key_padding_mask was given with cu_seqlens, but packed sequences have no padding"
            )
        check_key_padding_mask(key_padding_mask, *x.shape[:2])
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x, x)


def check_offsets(offsets: list[int], total: int) -> None:
    """Require the values of `cu_seqlens` to go from 0 to the number of tokens without decreasing."""
    if offsets[0] != 0 or offsets[-1] != total or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"cu_seqlens is {offsets}, but must rise from 0 to T = {total} without falling")


def shape(x: Tensor) -> list[int]:
    """Shape of a tensor as error messages print it."""
    return list(x.shape)


def check_input(name: str, x: object, axes: Sequence[str | int], weight: Tensor | None) -> None:
    """Require a tensor with these axes that matches `weight`; see `check_matches`.

    Only the size of the last axis is checked. Without a weight, any floating-point dtype is accepted.

    Raises:
        ValueError: `x` is not such a tensor; the message names it.
    """
    sizes = f"[{', '.join(map(str, axes))}]"
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, but must be a tensor {sizes}")
    if x.dim() != len(axes) or x.shape[-1] != axes[-1]:
        raise ValueError(f"{name} has shape {shape(x)}, but must be {sizes}")
    if weight is not None:
        check_matches(name, x, weight)
    elif not x.is_floating_point() and autocast_dtype(x.device) is None:
        raise ValueError(f"{name} is {x.dtype}, no floating-point type: convert one, or use autocast")


def check_matches(name: str, x: Tensor, weight: Tensor) -> None:
    """Require a tensor on the device and in the dtype of `weight`; under autocast, in any dtype.

    Raises:
        ValueError: `x` is not such a tensor; the message names it.
    """
    check_device(name, x, weight)
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        raise ValueError(
            f"{name} is {x.dtype}, but the weights are {weight.dtype}: convert one, or use autocast"
        )
