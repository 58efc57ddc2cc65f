"""The device that a command runs on."""

import torch


def choose(name: str | None) -> torch.device:
    """Return the named device; without a name, the first CUDA device or else the CPU.

    Raises:
        ValueError: the device is not available.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("meta"):
        raise ValueError(f"--device is {name}, but must be a device whose tensors hold values")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device is {name}, but must be a device of torch, as in cpu or cuda:1") from error
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).splitlines()[0].partition(". ")[0]  # torch goes on with all backends it has
        raise ValueError(f"--device {name} cannot be used here: {reason}") from error


def require_cpu(name: str | None, weights: str) -> None:
    """Raise ValueError if a device other than the CPU is named: packed weights run on the CPU only."""
    if name is not None and choose(name).type != "cpu":
        raise ValueError(f"--device is {name}, but {weights} weights run on the CPU")
