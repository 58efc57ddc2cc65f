"""Linear layers of a few rows on a CPU: passes the tensors to the C++ kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.dispatch import prefers

# With more rows, torch's matrix products are as fast. In half precision they use special instructions, so
# fewer rows are enough.
MOST_ROWS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can run these tensors and is the fastest choice."""
    dtype, inputs = x.dtype, weight.shape[1]
    return (
        0 < x.numel() <= MOST_ROWS.get(dtype, 0) * inputs
        and x.shape[-1] == inputs
        and x.is_cpu
        and x.layout is torch.strided
        and fits(weight, weight.shape, dtype)
        and (bias is None or fits(bias, weight.shape[:1], dtype))
        and prefers("native")
        and native.available()
    )


def fits(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a kernel may read a tensor as an array of this shape and type."""
    strided = x.layout is torch.strided
    return x.is_cpu and strided and x.dtype == dtype and x.shape == shape and x.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x W^T + b` for `x [..., in]`, `weight [out, in]` and `bias [out]`."""
    (outputs, inputs), (*batch, _), dtype, x = weight.shape, x.shape, x.dtype, x.contiguous()
    y = x.new_empty(*batch, outputs)
    problem = native.struct("Dense")(
        rows=x.numel() // inputs,
        inputs=inputs,
        outputs=outputs,
        type=native.TYPES[dtype],
        threads=torch.get_num_threads(),
        x=x.data_ptr(),
        weights=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
    )
    native.call("dense", problem)
    return y
