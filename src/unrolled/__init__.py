"""Attention you train as a transformer and run as an RNN."""

from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.linear import (
    LinearState,
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)
from unrolled.ops.softmax import softmax_attention

__version__ = "0.1.0"

__all__ = [
    "LinearState",
    "Supports",
    "UnsupportedError",
    "linear_attention",
    "linear_attention_reference",
    "linear_attention_step",
    "softmax_attention",
]
