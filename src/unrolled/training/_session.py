"""Process-wide state that a run changes and restores: random generators and signal handlers."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Save torch's global generators, and restore them after the block."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


class Interrupted(KeyboardInterrupt):
    """A signal ended a run, which can be resumed; `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.signal = number


class SignalFlag:
    """Whether a signal has asked the run to stop: `signal` is the number of the first one, else None."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_set(self) -> bool:
        """Return whether the run is to end."""
        return self.signal is not None


STOPPING = [x for x in signal.Signals if x.name in ("SIGINT", "SIGTERM", "SIGHUP")]  # Windows lacks SIGHUP


@contextmanager
def interrupt_flag() -> Iterator[SignalFlag]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a flag, so that a step is never interrupted.

    A second Ctrl-C stops immediately. A second SIGTERM or SIGHUP has no effect: these signals may arrive
    twice, from the system and from a parent process that forwards them. Signals that were ignored at the
    start, as under `nohup`, stay ignored.
    """
    flag = SignalFlag()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield flag
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    # A background job of a shell inherits an ignored Ctrl-C, but the second one must stop it.
    on_ctrl_c = before[signal.SIGINT]
    second = on_ctrl_c if callable(on_ctrl_c) else signal.default_int_handler

    def raise_flag(number: int, frame: FrameType | None) -> None:
        flag.signal = flag.signal or number
        if number == signal.SIGINT:
            signal.signal(number, second)

    caught = [n for n in STOPPING if n == signal.SIGINT or before[n] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, raise_flag)
    try:
        yield flag
    finally:
        for number in caught:
            signal.signal(number, before[number] or signal.SIG_DFL)
