"""The machine and its limits, which every result is compared with."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import unrolled
from unrolled.bench.case import Settings
from unrolled.bench.measure import take_turns
from unrolled.ops import native
from unrolled.ops.processor import description
from unrolled.threads import cpu_threads
from unrolled.training.memory import machine_bytes

BUFFER = 1 << 28  # bytes, far more than the last-level cache holds
PEERS = ("pytorch-fast-transformers", "fla-core", "onnxruntime", "llama-cpp-python", "triton", "numpy")


@dataclass(frozen=True)
class Limits:
    """The machine's own limits with the chosen number of threads.

    Attributes:
        flops: operations per second of a loop of multiply-adds in registers, or None.
        flops_missing: why `flops` is None.
        copying: bytes per second, read and written, of copying memory.
        reading: bytes per second of a sum, which only reads.
    """

    flops: float | None
    flops_missing: str
    copying: float
    reading: float


def limits(settings: Settings) -> Limits:
    """Measure the limits; `flops` is that of one thread times the number of threads."""
    why = "the loop runs on a CPU" if settings.device != "cpu" else native.missing() or ""
    flops = None if why else native.fma_peak() * settings.threads
    size = BUFFER >> 4 if settings.quick else BUFFER
    source, target = (torch.ones(size // 4, device=settings.device) for _ in range(2))
    with torch.inference_mode(), cpu_threads(settings.threads):
        copying = _seconds(lambda: target.copy_(source), settings)
    return Limits(flops, why, 2 * size / copying, size / seconds_to_read(size, settings))


def seconds_to_read(size: int, settings: Settings) -> float:
    """Measure how long it takes to reread `size` bytes, part of which may still be in a cache."""
    numbers = torch.ones(size // 4, device=settings.device)
    with torch.inference_mode(), cpu_threads(settings.threads):
        return _seconds(numbers.sum, settings)


def synchronized(run: Callable[[], object], device: str) -> Callable[[], object]:
    """Make `run` wait for the device."""
    if not device.startswith("cuda"):
        return run

    def wait() -> None:
        run()
        torch.cuda.synchronize(device)

    return wait


def describe(settings: Settings) -> dict[str, Any]:
    """Describe the machine, versions, threads and date of a benchmark."""
    described = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": machine_bytes(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "kernels": native.missing() or native.instruction_set(),
        "system": platform.platform(terse=True),
        "device": settings.device,
        "threads": settings.threads,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "versions": {
            "unrolled": unrolled.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: found for name in PEERS if (found := _version(name))},
        },
    }
    if settings.device.startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(settings.device)
    return described


def _seconds(run: Callable[[], object], settings: Settings) -> float:
    """Return the time of the fastest of several runs."""
    run = synchronized(run, settings.device)
    run()
    return min(take_turns({"": run}, least=3, budget=0.02 if settings.quick else 1.0)[""])


def processor() -> str:
    """Name the processor."""
    lines = description().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
