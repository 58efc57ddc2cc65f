"""What the operations that have Triton kernels share: where the kernels run, their launches and their checks.

Triton is imported by the first call of a kernel, not with this module.
"""

import importlib
import os
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

Version = tuple[int, ...]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
OLDEST_TRITON = (3, 3)  # the first with tuples as arguments
OLDEST_GPU = (8, 0)  # Ampere, the first with tf32


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device instead of the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def runs_on(device: torch.device) -> bool:
    """Whether kernels can run there: on CUDA with a Triton new enough, or anywhere in the interpreter.

    While a graph is traced, CUDA is enough: the operator in the graph checks again when it runs.
    """
    if torch.compiler.is_compiling():
        return device.type == "cuda"
    if device.type == "cuda":
        fit = torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST_GPU
    else:
        fit = os.environ.get("TRITON_INTERPRET") == "1"
    return fit and _is_installed()


@cache
def version() -> Version:
    """Return the version of Triton; raises ImportError if it is not installed."""
    return tuple(map(int, re.findall(r"\d+", importlib.import_module("triton").__version__)[:3]))


@cache
def _is_installed() -> bool:
    try:
        return version() >= OLDEST_TRITON
    except ImportError:
        return False
