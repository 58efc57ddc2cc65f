"""Muon with products in fp32 on devices that are slow in bf16. Importing this needs torch 2.9 or newer."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unrolled.ops.processor import multiplies_bf16


class _InFloat32(TorchFunctionMode):
    """Lets `Tensor.bfloat16` copy to fp32 instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class Muon(torch.optim.Muon):
    """torch's Muon, which orthogonalises in bf16.

    A processor without instructions for bf16 needs ten times as long for these products as in fp32.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, as torch's `Muon.step`."""
        device = self.param_groups[0]["params"][0].device
        with nullcontext() if multiplies_bf16(device) else _InFloat32():
            return super().step(closure)  # type: ignore[no-untyped-call]
