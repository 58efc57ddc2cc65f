"""What the system says about its processor."""

import platform
from functools import cache
from pathlib import Path

import torch

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of Intel and AMD, Intel, and Arm


@cache
def description() -> str:
    """Return what the system says: `/proc/cpuinfo`, or else one line."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor()


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device is made for products of bfloat16 matrices: GPUs from Ampere on, and some CPUs."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and not _BF16_FLAGS.isdisjoint(_words(description()))


def has_matrix_unit() -> bool:
    """Whether the CPU has a dedicated unit for products of bfloat16 matrices (AMX)."""
    return "amx_bf16" in _words(description())


@cache
def _words(text: str) -> frozenset[str]:
    """Return the words of a text, which has hundreds of kilobytes on a machine with many cores."""
    return frozenset(text.split())
