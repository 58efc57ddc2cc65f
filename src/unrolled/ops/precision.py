"""Which number type a computation is done in, decided in one place."""

import torch


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Type that sums and states are kept in: fp64 for fp64 inputs, fp32 for all narrower ones."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def exact_dtype(device: torch.device) -> torch.dtype:
    """Type for small quantities that must not drift (summed gates, angles): fp64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
