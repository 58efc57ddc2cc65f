"""Peak memory of a contender, in a process of its own: python -m unrolled.cli.bench.memory SETTINGS

On a CPU it is the most memory that the process ever held, less the same after the job at length `BASE`. Within
a process this only grows, so lengths are measured in rising order. On CUDA it is what torch allocated at most.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from unrolled.cli.bench import cases
from unrolled.cli.bench.case import Case, Settings

BASE = 64
STATUS = Path("/proc/self/status")


def peaks(case: Case, contender: str, sizes: Sequence[int], settings: Settings) -> dict[int, int]:
    """Return bytes by size.

    Raises:
        RuntimeError: the process ended with an error, or for want of memory.
    """
    question = json.dumps([case.name, contender, sorted(sizes), asdict(settings)])
    found = subprocess.run([sys.executable, "-m", __name__, question], capture_output=True, text=True)
    if found.returncode:
        lines = found.stderr.strip().splitlines() or [f"exit code {found.returncode}"]
        raise RuntimeError(f"the process that measures the memory of {contender} ended: {lines[-1]}")
    answer = json.loads(found.stdout.splitlines()[-1])
    return {size: max(0, peak) for size, peak in zip(sorted(sizes), answer, strict=True)}


def _peak(case: Case, contender: str, size: int, settings: Settings) -> int:
    on_cuda = settings.device.startswith("cuda")
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(settings.device)
    contenders = case.problem(size, settings).contenders
    run = next(x for x in contenders if x.name == contender).prepare()
    run()
    if on_cuda:
        return torch.cuda.max_memory_allocated(settings.device)
    return _most_held()


def _most_held() -> int:
    if STATUS.exists():  # Linux; there, getrusage begins with the parent's peak
        return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split()[0])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def main() -> None:
    """Measure what the parent asks for, and print it as JSON."""
    case_name, contender, sizes, fields = json.loads(sys.argv[1])
    settings = Settings(**fields)
    case = cases.find(case_name)
    torch.set_num_threads(settings.threads)
    base = _peak(case, contender, BASE, settings)
    print(json.dumps([_peak(case, contender, size, settings) - base for size in sizes]))


if __name__ == "__main__":
    main()
