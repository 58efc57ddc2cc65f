"""The memory of this process, and of the tensors that it makes."""

import ctypes
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

STATUS = Path("/proc/self/status")  # Linux only
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a Linux container; "max" if there is no limit

# Parameters of glibc's `mallopt`, and the variables of the environment that set them.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"}


def keep_freed_memory() -> bool:
    """Keep the memory that this process frees for its next tensors. `unrolled train` does so.

    By default, glibc returns the memory of a tensor of 32 MB or more to the system as soon as the tensor is
    freed. The system then clears the memory of the next such tensor page by page, which may take a third of
    the time of a training step.

    Returns:
        Whether the memory is kept. It is not if the C library is not glibc, or if one of its variables
        (`MALLOC_TRIM_THRESHOLD_`, for instance) is set in the environment.
    """
    if sys.platform != "linux" or _SETTINGS & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # No memory outside the heap, and a heap that never shrinks.
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def machine_bytes() -> int | None:
    """Return the memory that this machine or container has, or None where the system does not report it."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # not on every system
        return None
    limit = CONTAINER_LIMIT.read_text(encoding="ascii").strip() if CONTAINER_LIMIT.exists() else ""
    return min(total, int(limit)) if limit.isdecimal() else total


def process_bytes(field: str) -> int:
    """Return a size from `/proc/self/status`: "VmRSS" is held now, "VmHWM" the peak."""
    status = STATUS.read_text(encoding="ascii", errors="replace")
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def begin_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from here on, where it counts torch's tensors."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory of a run so far: of torch's tensors on CUDA, else of the whole process.

    None where the system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    if sys.platform == "linux":  # where `ru_maxrss` includes the peak of the parent process
        try:
            return process_bytes("VmHWM")
        except (OSError, IndexError):  # in some sandboxes, there is no such file, or it lacks this line
            return None
    import resource  # not available on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the bytes of the tensors made inside it that exist at the same time.

    Temporary memory inside an operation is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()  # each storage with the function that stops counting it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._known.setdefault(storage, None)  # made outside, or counted already
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage not in self._known:
                size = storage.nbytes()
                self.live += size
                self._known[storage] = weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.live)
        return result

    def forget(self, x: Tensor) -> None:
        """Stop counting the memory of a tensor, as if it were freed."""
        for storage in _storages(x):
            if stop := self._known.get(storage):
                stop()  # once only

    def _free(self, size: int) -> None:
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
    return [x.untyped_storage() for x in tensors if not is_traceable_wrapper_subclass(x)]  # such as a DTensor
