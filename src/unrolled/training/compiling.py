"""Training with the blocks of a model compiled by `torch.compile`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unrolled.contract import UnsupportedError
from unrolled.models.blocks import ResidualBlock
from unrolled.models.reversible import ReversibleBlock
from unrolled.training.interfaces import Trainable


@contextmanager
def compiled(model: Trainable) -> Iterator[None]:
    """Compile the forward pass of each block when it first runs; restore the model at the end.

    Blocks that are alike share one compilation, so the time does not grow with the depth.

    Raises:
        UnsupportedError: the model has no blocks, or reversible blocks, or torch cannot compile here.
    """
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    name = type(model).__name__
    if not blocks:
        raise UnsupportedError(f"{name} has no blocks to compile: use compile=False")
    if any(isinstance(block, ReversibleBlock) for block in blocks):
        raise UnsupportedError(f"the reversible blocks of {name} cannot be compiled: use compile=False")
    _check_compiler(next(blocks[0].parameters()).device)
    for block in blocks:
        block.compile()
    try:
        yield
    finally:
        for block in blocks:
            vars(block).pop("_compiled_call_impl", None)


def _check_compiler(device: torch.device) -> None:
    """Compile one operation, so that a missing compiler is found before the run begins.

    Raises:
        UnsupportedError: the compilation fails, as without a C++ compiler.
    """
    try:
        torch.compile(torch.neg)(torch.zeros(8, device=device))
    except Exception as error:  # compilers raise errors of many types
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"torch.compile does not work here ({reason}): use compile=False") from error
