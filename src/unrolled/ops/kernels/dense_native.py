"""Linear layers of a few rows on a CPU: hands the tensors to the C++ kernel, mirroring its struct."""

import ctypes

import torch
from torch import Tensor

from unrolled.ops.kernels import native
from unrolled.ops.kernels.door import prefers

# Above these, torch's matrix products are as fast; they have bf16 instructions to use.
MOST_ROWS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}

_INT, _FLAG, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class _Dense(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("rows", "inputs", "outputs")),
        *((name, _FLAG) for name in ("type", "threads")),
        *((name, _POINTER) for name in ("x", "weights", "bias", "y")),
    ]


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can run these tensors, and is the fastest way to."""
    dtype, inputs = x.dtype, weight.shape[1]
    return (
        0 < x.numel() <= MOST_ROWS.get(dtype, 0) * inputs
        and x.shape[-1] == inputs
        and x.is_cpu
        and weight.is_cpu
        and weight.dtype == dtype
        and weight.is_contiguous()
        and (bias is None or (bias.is_cpu and bias.dtype == dtype and bias.is_contiguous()))
        and prefers("native")
        and native.available()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x W^T + b` for `x [..., in]`, `weight [out, in]` and `bias [out]`."""
    (outputs, inputs), (*batch, _), dtype, x = weight.shape, x.shape, x.dtype, x.contiguous()
    y = torch.empty(*batch, outputs, dtype=dtype)
    sizes = (x.numel() // inputs, inputs, outputs, native.TYPES[dtype], torch.get_num_threads())
    at_bias = None if bias is None else bias.data_ptr()
    native.call("dense", _Dense(*sizes, x.data_ptr(), weight.data_ptr(), at_bias, y.data_ptr()))
    return y
