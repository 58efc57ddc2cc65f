"""What a run changes in the whole process, and puts back when it ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Give the block torch's global generators for its own; the caller's go on untouched afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Run the block on so many CPU threads; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def interrupt_flag() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a flag, so that a step is never cut in half; the second stops at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield flag
        return
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler
    # A job in the background of a shell inherits that Ctrl-C is ignored, but the second one must not be.
    second = before if callable(before) else signal.default_int_handler

    def raise_flag(number: int, frame: FrameType | None) -> None:
        flag.set()
        signal.signal(signal.SIGINT, second)

    signal.signal(signal.SIGINT, raise_flag)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
