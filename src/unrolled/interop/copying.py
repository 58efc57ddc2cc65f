"""Copying the weights of another library's layers."""

from typing import Any

import torch
from torch import nn

from unrolled.contract import UnsupportedError


@torch.no_grad()
def copy_linear(ours: Any, *theirs: Any) -> None:
    """Copy linear layers that read the same input into one, stacked by rows; a missing bias is 0.

    Raises:
        ValueError: theirs do not add up to the size of ours.
    """
    weight = torch.cat([layer.weight for layer in theirs])
    _fill(ours.weight, weight)
    if ours.bias is not None:
        biases = [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            for layer in theirs
        ]
        _fill(ours.bias, torch.cat(biases))


@torch.no_grad()
def copy_norm(ours: Any, theirs: Any) -> None:
    """Copy a layer norm; a missing weight is 1 and a missing bias 0."""
    _fill(ours.weight, torch.ones_like(ours.weight) if theirs.weight is None else theirs.weight)
    _fill(ours.bias, torch.zeros_like(ours.bias) if theirs.bias is None else theirs.bias)


def copy_norms_and_feed_forward(block: Any, layer: Any) -> None:
    """Copy an encoder layer with torch's parameter names into a block, except for the attention."""
    copy_norm(block.attention_norm, layer.norm1)
    copy_norm(block.ff_norm, layer.norm2)
    copy_linear(block.ff.up, layer.linear1)
    copy_linear(block.ff.down, layer.linear2)


@torch.no_grad()
def copy_rows(ours: Any, rows: torch.Tensor) -> None:
    """Fill an embedding table."""
    _fill(ours.weight, rows)


def copy_last_norm(norm: Any, like: torch.Tensor) -> nn.LayerNorm:
    """Copy the norm that some encoders, even post-norm ones, have after their last block.

    Args:
        norm: theirs.
        like: a tensor with the dtype and device of the copy.

    Raises:
        UnsupportedError: it is no layer norm.
    """
    if not isinstance(norm, nn.LayerNorm):
        raise UnsupportedError(f"the last norm is a {type(norm).__name__}; a torch.nn.LayerNorm is supported")
    ours = nn.LayerNorm(norm.normalized_shape, eps=norm.eps).to(like)
    copy_norm(ours, norm)
    return ours


def _fill(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if ours.shape != theirs.shape:
        raise ValueError(f"the weights have shape {list(theirs.shape)}, but must have {list(ours.shape)}")
    ours.copy_(theirs)
