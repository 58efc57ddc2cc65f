"""Evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Run the block in evaluation mode; restore the mode of every submodule afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


@contextmanager
def drawing_mode(model: object) -> Iterator[None]:
    """Run the block in evaluation mode and without gradients, for generation."""
    with evaluation_mode(model), torch.inference_mode():
        yield
