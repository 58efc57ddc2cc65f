"""The rule of a diagonal plus low rank in plain PyTorch.

Packed sequences of similar lengths run together, padded on the right.
"""

from torch import Tensor

from unrolled.ops.dplr import chunked
from unrolled.ops.dplr.chunked import Inputs
from unrolled.ops.operators import gradients
from unrolled.ops.recurrence import run_packed


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what `chunked.forward` does for each sequence; the state has one row per sequence."""
    return run_packed(chunked.forward, inputs, cu_seqlens)


def backward(grad_o: Tensor, grad_state: Tensor, inputs: Inputs, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Compute the gradients of the inputs."""
    return gradients(lambda *xs: forward(Inputs(*xs), cu_seqlens), inputs, (grad_o, grad_state))
