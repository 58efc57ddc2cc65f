"""An exponential moving average of the weights."""

import copy

import torch
from torch import Tensor, nn

from unrolled.training.interfaces import Trainable


def check_averaged(model: Trainable) -> None:
    """Reject weights of 16 bits, in which averages would not move: each change is below their precision.

    Raises:
        ValueError: a weight has 16 bits.
    """
    for name, x in model.named_parameters():
        if x.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"ema is set, but {name} is {x.dtype}: average weights in fp32, which bf16=True also trains"
            )


def averaged_copy(model: Trainable) -> Trainable:
    """Copy a model, to hold averages of its weights."""
    averaged = copy.deepcopy(model)
    for _, x in averaged.named_parameters():
        x.requires_grad_(False)
    return averaged


@torch.no_grad()
def average(averaged: Trainable, model: Trainable, decay: float, updates: int) -> None:
    """Move the averages towards the weights after a number of updates; buffers are copied.

        a' = b a + (1 - b) w        b = min(decay, (1 + updates) / (10 + updates))

    where a is an average and w the weight. The small b of the first updates makes the averages forget the
    initial weights soon.
    """
    decay = min(decay, (1 + updates) / (10 + updates))
    for a, x in zip(tensors_of(averaged).values(), tensors_of(model).values(), strict=True):
        if isinstance(x, nn.Parameter):
            a.lerp_(x, 1 - decay)
        else:
            a.copy_(x)


def tensors_of(model: Trainable) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name; a tensor with several names appears once."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        unique.setdefault(id(x), (name, x))
    return dict(unique.values())
