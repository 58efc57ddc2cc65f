"""torch's own recurrent kernels (cuDNN's, oneDNN's), which run all steps of a known cell in one call."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from unrolled.ops.checks import transforming

State = TypeVar("State", bound=tuple[Any, ...])


def run(
    kernel: Callable[..., tuple[Tensor, ...]], x: Tensor, state: State, weights: list[Tensor]
) -> tuple[Tensor, State] | None:
    """Run a kernel of `torch._VF` over `x [B,T,P]` from a state of tensors `[B,N]`.

    None where it must not be used: by a compiler, which wants to see the steps; under a transform of
    `torch.func` or autocast, which the kernels know nothing of; for types or lengths that they do not have.
    On a CPU gradients of any order pass; cuDNN's kernels have first ones only. Steps have all of them, on any
    device, and run in their place wherever a `key_padding_mask` is given.

    Args:
        kernel: one of `rnn_tanh`, `gru` and `lstm`.
        x: the inputs.
        state: where to begin.
        weights: W `[.,P]`, U `[.,N]` and their two biases, in torch's order of gates.
    """
    if torch.compiler.is_compiling() or transforming() or torch.is_autocast_enabled(x.device.type):
        return None
    if x.numel() == 0 or any(part.dtype != x.dtype for part in state):
        return None
    hidden = [part.unsqueeze(0) for part in state]  # the layers
    recording = torch.is_grad_enabled()  # what torch calls training: keep what the backward wants
    y, *after = kernel(
        x, hidden if len(hidden) > 1 else hidden[0], weights, True, 1, 0.0, recording, False, True
    )
    return y, type(state)(*(part.squeeze(0) for part in after))
