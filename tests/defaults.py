"""Another type of new tensors by default, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of this type inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
