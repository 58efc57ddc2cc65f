"""Softmax attention: over whole sequences (`attention`), and token by token with a cache (`cache`).

o_i = sum_j softmax_j(scale q_i . k_j) v_j        Vaswani et al. 2017 (arXiv 1706.03762), eq. 1
"""

from unrolled.ops.softmax.attention import softmax_attention, softmax_or_zero
from unrolled.ops.softmax.cache import (
    CACHE_GROWS,
    KVCache,
    attend_to_cache,
    cached_length,
    cached_scores,
    empty_cache,
    extend_cache,
    extend_cache_by_one,
    softmax_prefill,
    softmax_step,
)

__all__ = [
    "CACHE_GROWS",
    "KVCache",
    "attend_to_cache",
    "cached_length",
    "cached_scores",
    "empty_cache",
    "extend_cache",
    "extend_cache_by_one",
    "softmax_attention",
    "softmax_or_zero",
    "softmax_prefill",
    "softmax_step",
]
