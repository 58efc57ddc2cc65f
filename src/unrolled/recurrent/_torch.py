"""torch's recurrent kernels (cuDNN, oneDNN), which run all steps of a known cell in one call."""

from collections.abc import Callable

import torch
from torch import Tensor

from unrolled.ops.observing import transforming
from unrolled.ops.precision import autocast_dtype
from unrolled.recurrent._layer import State


def run(
    kernel: Callable[..., tuple[Tensor, ...]], x: Tensor, state: State, weights: list[Tensor]
) -> tuple[Tensor, State] | None:
    """Run a kernel of `torch._VF` over `x [B,T,P]` from a state of tensors `[B,N]`.

    Return None where the kernel cannot be used: under a compiler, which traces the steps instead, and for
    what the kernels do not support, which is transforms of `torch.func`, autocast, and some types and
    lengths. On a CPU, the kernels have gradients of any order; those of cuDNN have first-order gradients
    only, but within `torch.backends.cudnn.flags(enabled=False)`, torch replaces them by others.

    Args:
        kernel: one of `rnn_tanh`, `gru` and `lstm`.
        x: the inputs.
        state: the initial state.
        weights: W `[.,P]`, U `[.,N]` and their two biases, in torch's order of gates.
    """
    if torch.compiler.is_compiling() or transforming() or autocast_dtype(x.device) is not None:
        return None
    parts = [part for part in state if isinstance(part, Tensor)]
    if x.numel() == 0 or any(part.dtype != x.dtype for part in parts):
        return None
    hidden = [part.unsqueeze(0) for part in parts]  # one layer
    recording = torch.is_grad_enabled()  # torch calls it training: store what the backward pass needs
    initial = hidden if len(hidden) > 1 else hidden[0]
    y, *after = kernel(x, initial, weights, True, 1, 0.0, recording, False, True)
    return y, type(state)(*(part.squeeze(0) for part in after))
