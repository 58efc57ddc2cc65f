"""Content addressing: weights by the cosine of a key and each row of a memory, sharpened by a strength.

w_i = softmax_i(beta k . m_i / (|k| |m_i|))        Graves et al. 2014 (arXiv 1410.5401), eq. 5 and 6
"""

import torch
from torch import Tensor

from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.softmax import softmax_or_zero

EPSILON = 1e-8
"""Added to squared norms, so that the cosine of a vector of zeros is 0, with finite gradients."""


def cosine_weights(
    key: Tensor,
    memory: Tensor,
    beta: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """w = softmax_s(beta cos(key, memory_s)), computed in at least fp32.

    Args:
        key: `[B,...,W]`, any number of keys for each memory.
        memory: `[B,N,W]`.
        beta: strengths `[B,...]`.
        key_padding_mask: `[B,N]`, True = padding, which gets no weight.
        epsilon: added to the squared norms.

    Returns:
        weights `[B,...,N]` that add up to 1, in the dtype of the key; 0 in rows that are all padding.
    """
    dtype = accumulation_dtype(key.dtype, memory.dtype)
    if key_padding_mask is not None:
        memory = memory.masked_fill(key_padding_mask.unsqueeze(-1), 0)
    keys = (key.flatten(1, -2) if key.dim() > 2 else key.unsqueeze(1)).to(dtype)
    memory, beta = memory.to(dtype), beta.to(dtype).reshape(*keys.shape[:2], 1)
    with without_autocast(memory.device):
        cosines = keys @ memory.mT * _inverse_norm(memory, epsilon).mT * _inverse_norm(keys, epsilon)
    scores = beta * cosines
    if key_padding_mask is None:
        weights = scores.softmax(-1)
    else:
        weights = softmax_or_zero(scores.masked_fill(key_padding_mask.unsqueeze(1), -torch.inf))
    return weights.reshape(*key.shape[:-1], memory.shape[1]).to(key.dtype)


def unit(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """x / sqrt(|x|^2 + epsilon) over the last axis."""
    return x * _inverse_norm(x, epsilon)


def _inverse_norm(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(|x|^2 + epsilon) over the last axis, which is kept."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon)
