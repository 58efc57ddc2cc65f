"""Window attention on a CPU: hands the tensors to the C++ kernels, whose structs are mirrored here."""

import ctypes

import torch
from torch import Tensor

from unrolled.ops.checks import check_offsets
from unrolled.ops.kernels import native
from unrolled.ops.kernels.native import FLAG, INT, POINTER, TYPES, TensorView, address, readable, view
from unrolled.ops.window_blocks import Inputs, bounded


class Window(ctypes.Structure):
    """`Window` of `native/problem.h`."""

    _fields_ = [
        *((name, INT) for name in ("sequences", "queries", "keys", "heads", "groups", "features", "values")),
        *((name, INT) for name in ("left", "right")),
        *((name, FLAG) for name in ("type", "threads")),
        ("scale", ctypes.c_double),
        *((name, POINTER) for name in ("offsets", "padding")),
        *((name, TensorView) for name in "qkv"),
    ]


class WindowOutputs(ctypes.Structure):
    """`WindowOutputs` of `native/problem.h`."""

    _fields_ = [(name, POINTER) for name in ("o", "lse")]


class WindowGradients(ctypes.Structure):
    """`WindowGradients` of `native/problem.h`."""

    _fields_ = [("o", TensorView), *((name, POINTER) for name in ("d_lse", "lse", "d_q", "d_k", "d_v"))]


def supports(inputs: Inputs) -> bool:
    """Whether the kernels can run inputs of this type, on this device."""
    return inputs.q.device.type == "cpu" and inputs.q.dtype in TYPES and native.available()


def forward(
    inputs: Inputs, cu_seqlens: Tensor | None, window_size: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute what `window_blocks.forward` does."""
    problem, _kept = _problem(inputs, cu_seqlens, window_size, scale)
    B, T, H, _ = inputs.q.shape
    o, lse = inputs.v.new_empty(B, T, H, inputs.v.shape[3]), inputs.q.new_empty(B, T, H, dtype=torch.float32)
    native.call("window_forward", problem, WindowOutputs(address(o), address(lse)))
    return o, lse


def backward(
    grad_o: Tensor,
    grad_lse: Tensor,
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    lse: Tensor,
    window_size: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `window_blocks.backward` does."""
    problem, _kept = _problem(inputs, cu_seqlens, window_size, scale)
    q, k, v, padding = inputs
    grad_o, grad_lse, lse = readable(grad_o), grad_lse.contiguous(), lse.contiguous()
    every_key_is_read = padding is None and q.shape[1] >= k.shape[1]
    new = torch.empty if every_key_is_read else torch.zeros
    d_q = torch.empty(q.shape, dtype=q.dtype)
    d_k, d_v = (new(x.shape, dtype=x.dtype) for x in (k, v))
    arriving = (view(grad_o), address(grad_lse), address(lse))
    native.call("window_backward", problem, WindowGradients(*arriving, *map(address, (d_q, d_k, d_v))))
    return d_q, d_k, d_v


def _problem(
    inputs: Inputs, cu_seqlens: Tensor | None, window_size: tuple[int, int], scale: float
) -> tuple[Window, tuple[Tensor | None, ...]]:
    """Describe the problem; the tensors own the memory it points at, and are kept until it is solved."""
    q, k, v, padding = inputs
    (B, T, H, D), (_, S, G, M) = q.shape, v.shape
    N = B
    if cu_seqlens is not None:
        check_offsets(cu_seqlens.tolist(), T)  # wrong ones would read and write anywhere
        N, cu_seqlens = cu_seqlens.shape[0] - 1, cu_seqlens.contiguous()
    q, k, v = readable(q), readable(k), readable(v)
    padding = None if padding is None else padding.contiguous()
    left, right = bounded(window_size, T, S)
    sizes = (N, T, S, H, G, D, M, min(left, S), min(right, T), TYPES[q.dtype], torch.get_num_threads(), scale)
    problem = Window(*sizes, address(cu_seqlens), address(padding), view(q), view(k), view(v))
    return problem, (cu_seqlens, padding, q, k, v)
