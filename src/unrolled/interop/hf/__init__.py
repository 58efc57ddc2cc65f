"""Hugging Face transformers."""

from unrolled.interop.hf.weights import import_weights

__all__ = ["import_weights"]
