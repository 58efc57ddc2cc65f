"""Temporary evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

_lock = Lock()
_inside: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()
"""For each module in such a block: how many blocks run, in all threads, and its mode before them."""


@contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Run the block in evaluation mode; the last of such blocks restores the mode of every submodule."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    with _lock:
        found = [(module, *_inside.get(module, (0, module.training))) for module in modules]
        for module, blocks, mode in found:  # after all were read: that of a compiled module is its model's
            _inside[module] = blocks + 1, mode
            module.training = False
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                blocks, mode = _inside.pop(module)
                if blocks > 1:
                    _inside[module] = blocks - 1, mode
                else:
                    module.training = mode


@contextmanager
def drawing_mode(model: object) -> Iterator[None]:
    """Run the block in evaluation mode and without gradients, for generation."""
    with evaluation_mode(model), torch.inference_mode():
        yield
