"""Hugging Face transformers: our models among theirs."""

from unrolled.interop.hf.cache import StateCache, StateLayer

__all__ = ["StateCache", "StateLayer"]
