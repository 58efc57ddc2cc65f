"""The number of CPU threads of torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_THREADS = 1024  # the system cannot start more, and fails only after the work has begun


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Run the block with this number of CPU threads; None leaves it unchanged.

    Raises:
        ValueError: the number is above `MAX_THREADS`.
    """
    if count is not None and count > MAX_THREADS:
        raise ValueError(f"threads is {count}, but must be at most {MAX_THREADS}")
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
