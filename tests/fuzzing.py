"""What the fuzzers share: many seeded cases, each bounded in time and memory, counted by outcome.

`make test` runs `FEW` cases of each fuzzer, `make fuzz` 10,000. A case depends on its seed only, so
`FUZZ_SEED=17 pytest tests/fuzz/test_tensors.py` runs again what "seed 17" found.
"""

import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from unrolled.contract import UnsupportedError

FEW = int(os.environ.get("FUZZ_CASES", "100"))
BLOCK = max(25, FEW // 200)  # cases of one test: what pytest-xdist hands out at once
SHOWN = 12  # failures of one block, at most
ALLOWED_MEMORY = 4 << 30  # bytes beyond what the process has already

blocks = (
    pytest.mark.parametrize("seeds", [range(int(seed), int(seed) + 1)])
    if (seed := os.environ.get("FUZZ_SEED"))
    else pytest.mark.parametrize(
        "seeds",
        [range(first, min(first + BLOCK, FEW)) for first in range(0, FEW, BLOCK)],
        ids=lambda seeds: f"seeds {seeds.start} to {seeds.stop - 1}",
    )
)


class TooLongError(BaseException):
    """Ends a case that hangs. Not an Exception, so that nothing under test takes it for its own."""


class Case(Random):
    """The random numbers of a case, and what it is about, for the report of one that hangs."""

    what = "not begun"


class BrokenError(AssertionError):
    """What a case must not do."""


def run(case: Callable[[Case], str], seeds: range, record: Any, seconds: float = 20) -> None:
    """Run the cases of some seeds, count their outcomes and fail with all that broke."""
    outcomes: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        drawn = Case(seed)
        try:
            with bounded(seconds):
                outcomes[case(drawn)] += 1
        except TooLongError:
            outcomes["hang"] += 1
            broken.append(f"seed {seed}: ran for more than {seconds} seconds: {drawn.what}")
        except BrokenError as error:
            outcomes["broken"] += 1
            broken.append(f"seed {seed}: {error}")
    record("outcomes", dict(outcomes))
    assert not broken, "\n".join([f"{len(broken)} of {len(seeds)} cases", *broken[:SHOWN]])


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Bound the time and the memory of a block; Unix only, as the fuzzers are."""

    def stop(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ALLOWED_MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def check_refusal(error: BaseException, what: str) -> str:
    """Require one sentence of a kind that callers expect, and return that kind."""
    if not isinstance(error, ValueError | UnsupportedError):
        raise BrokenError(f"{what}: {type(error).__name__}: {error}"[:600])
    message = str(error)
    if not message or "\n" in message or "alloc_cpu" in message:
        raise BrokenError(f"{what}: {type(error).__name__} is not one sentence: {message!r}"[:600])
    return "refused"
