"""Peak memory of a contender, in a separate process: python -m unrolled.bench.memory QUESTION

It is the maximum memory of the process during the job, minus its memory just before: outputs are counted,
inputs and weights are not. On CUDA, it is the same difference for the memory that torch allocated.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from unrolled.bench import cases
from unrolled.bench.case import Case, Settings
from unrolled.training.memory import process_bytes

WARM_UP = 64  # the length of a first run, which loads libraries and kernels
CLEAR = Path("/proc/self/clear_refs")
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc would keep blocks of up to 32 MiB for later


def peaks(case: Case, contender: str, sizes: Sequence[int], settings: Settings) -> dict[int, int]:
    """Return peak bytes by size; an empty dict on the CPU of systems other than Linux, which report none.

    Raises:
        RuntimeError: the process ended with an error, or ran out of memory.
    """
    if settings.device == "cpu" and not CLEAR.exists():
        return {}
    question = json.dumps([case.name, contender, list(sizes), asdict(settings)])
    command = [sys.executable, "-m", __name__, question]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | RETURN_FREED)
    if found.returncode:
        lines = found.stderr.strip().splitlines() or [f"exit code {found.returncode}"]
        raise RuntimeError(f"the process that measures the memory of {contender} ended: {lines[-1]}")
    return dict(zip(sizes, json.loads(found.stdout.splitlines()[-1]), strict=True))


def peak(run: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak bytes that `run` adds to the memory of this process."""
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    CLEAR.write_text("5")  # resets the peak to the current memory
    before = process_bytes("VmRSS")
    run()
    return max(0, process_bytes("VmHWM") - before)


def main() -> None:
    """Answer the question of the parent process on stdout, as JSON."""
    case_name, contender, sizes, fields = json.loads(sys.argv[1])
    settings = Settings(**fields)
    case = cases.find(case_name)
    torch.set_num_threads(settings.threads)

    def prepared(size: int) -> Callable[[], object]:
        contenders = case.problem(size, settings).contenders
        return next(x for x in contenders if x.name == contender).prepare()

    prepared(WARM_UP)()
    print(json.dumps([peak(prepared(size), settings.device) for size in sizes]))


if __name__ == "__main__":
    main()
