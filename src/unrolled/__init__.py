"""Attention you train as a transformer and run as an RNN."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unrolled.contract import Supports, UnsupportedError
    from unrolled.ops.linear import (
        LinearState,
        linear_attention,
        linear_attention_reference,
        linear_attention_step,
    )
    from unrolled.ops.softmax import softmax_attention
    from unrolled.ops.window import window_attention, window_attention_reference

__version__ = "0.1.0"

__all__ = [
    "LinearState",
    "Supports",
    "UnsupportedError",
    "linear_attention",
    "linear_attention_reference",
    "linear_attention_step",
    "softmax_attention",
    "window_attention",
    "window_attention_reference",
]

_MODULES = {
    "contract": ("Supports", "UnsupportedError"),
    "ops.linear": ("LinearState", "linear_attention", "linear_attention_reference", "linear_attention_step"),
    "ops.softmax": ("softmax_attention",),
    "ops.window": ("window_attention", "window_attention_reference"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that `unrolled --help` does not wait for torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
