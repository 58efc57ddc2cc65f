"""Hugging Face transformers: our models among theirs."""

from unrolled.interop.hf.cache import StateCache, StateLayer
from unrolled.interop.hf.linearize import linearize, load_linearized, new_parameters, state_cache

__all__ = ["StateCache", "StateLayer", "linearize", "load_linearized", "new_parameters", "state_cache"]
