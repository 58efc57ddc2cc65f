"""Where a command runs."""

import torch


def choose(name: str | None) -> torch.device:
    """Return the named device, or without a name the first CUDA device, or the CPU.

    Raises:
        ValueError: the device does not exist here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("meta"):
        raise ValueError(f"--device is {name}, but tensors there hold no values")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here: {reason}") from error
